"""The row that a stress run leaves, whatever came of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from ...command.outputs import check_outputs
from ...records.csv_rows import read_rows


@dataclass(frozen=True)
class StressRecord:
    """A run. A row is as good as its `status`: "ok" if the run ended by itself and nothing was wrong.

    Args:
        device: "cpu" (interpreted) or "cuda" (any GPU).
        families, variants: how many of them were called.
        dtypes: that they were called with, separated by spaces.
        operators: open at once; each is a variant, a shape and a dtype.
        calls: made and checked in full; one of all ranks together counts once.
        elements: checked, over all ranks.
        mismatches: elements that were wrong.
        seconds: from the first call after warm-up to the last.
        warm_up_seconds: before it: starting ranks, compiling, every operator's first call.
        status: "ok", "wrong" (there are mismatches) or "error" (the run ended early); `error` says why.
        timestamp: when it ended, UTC.
    """

    device_name: str
    device: str
    world_size: int
    families: int
    variants: int
    dtypes: str
    operators: int
    calls: int
    elements: int
    mismatches: int
    seconds: float
    warm_up_seconds: float
    status: str
    error: str
    seed: int
    torch: str
    triton: str
    driver: str
    commit: str
    timestamp: str
    command: str


COLUMNS = [column.name for column in fields(StressRecord)]


def check_file(path: Path) -> None:
    """Make a file's folder, where it is missing.

    Raises:
        ValueError: the file cannot be written, or holds something else than such rows.
    """
    check_outputs(("--out", path))
    if not path.exists():
        return
    if read_rows(path).header != COLUMNS and path.stat().st_size:
        raise ValueError(f"{path} holds something else than the rows of iris-bench stress; give another --out")
