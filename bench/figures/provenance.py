"""Where and when each CSV was measured: from its own columns."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ..records.frames import rows_of
from .results import RESULTS

_COMMITS = 3  # more are not listed


def files() -> str:
    """Return a row a CSV: its hardware, versions, commits and date."""
    lines = ["| file | rows | hardware | driver, torch, Triton | commit | date |", "|---|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.csv")):
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        cells = [f"[{path.name}]({path.name})", str(len(frame)), _hardware(path, frame)]
        versions = [_distinct(frame, column) for column in ("driver", "torch", "triton")]
        commits = list(dict.fromkeys(frame.commit))
        few = len(commits) <= _COMMITS
        shown = ", ".join(f"`{one}`" for one in commits) if few else f"{len(commits)}, see the file"
        days = sorted({one[:10] for one in frame.timestamp})
        date = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        lines.append("| " + " | ".join([*cells, ", ".join(versions), shown, date]) + " |")
    return "\n".join(lines)


def _hardware(path: Path, frame: pd.DataFrame) -> str:
    names = dict.fromkeys(name.removeprefix("NVIDIA ") for name in frame.device_name)
    sizes = dict.fromkeys(frame.world_size) if "world_size" in frame else {}
    if not sizes:  # of experiments: the file's name has the number
        stem = path.stem.rpartition("x")[2]
        sizes = {stem if stem.isdigit() else "1": None}
    return f"{', '.join(sizes)} × {', '.join(names)}"


def _distinct(frame: pd.DataFrame, column: str) -> str:
    return " and ".join(one for one in dict.fromkeys(frame[column]) if one)


def stress() -> str:
    """Return a row a run of ``iris-bench stress``."""
    frame = pd.read_csv(RESULTS / "stress.csv")
    lines = ["| GPUs | operators | calls | elements compared | wrong | commit |", "|---|---|---|---|---|---|"]
    for row in rows_of(frame):
        gpu = row.device_name.removeprefix("NVIDIA ")
        counts = f"{row.operators} | {row.calls:,} | {row.elements:.2g} | {row.mismatches}"
        lines.append(f"| {row.world_size} × {gpu} | {counts} | `{row.commit}` |")
    return "\n".join(lines)
