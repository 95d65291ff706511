"""Where and when each CSV was measured, from its own columns; and what these mean."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pandas as pd

from ..correctness.stress.record import StressRecord
from ..records.frames import rows_of
from ..records.record import Record, kind_of
from .evidence import LEFT_OUT, RESULTS, csvs, machines, short_name, sweeps
from .markdown import table

_COMMITS = 3  # more are not listed


def files(folder: str = "") -> str:
    """Return a row a CSV, with its hardware, versions, commits and date.

    Args:
        folder: one of results/; else those that tables and pictures are made from.
    """
    assert not folder or folder in LEFT_OUT
    base = RESULTS / folder
    lines = []
    for path in sorted(base.glob("*.csv")) if folder else csvs():
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        days = sorted({one[:10] for one in frame.timestamp})
        date = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        versions = [_distinct(frame, column) for column in ("driver", "torch", "triton")]
        name = path.relative_to(base)
        cells = [f"[{name}]({name})", str(len(frame)), _hardware(path, frame), ", ".join(versions)]
        lines.append([*cells, _commits(frame), date])
    return table(["file", "rows", "hardware", "driver, torch, Triton", "commit", "date"], lines)


def _commits(frame: pd.DataFrame) -> str:
    commits = list(dict.fromkeys(frame.commit))
    return ", ".join(f"`{one}`" for one in commits) if len(commits) <= _COMMITS else f"{len(commits)}, see the file"


def _hardware(path: Path, frame: pd.DataFrame) -> str:
    names = dict.fromkeys(name.removeprefix("NVIDIA ") for name in frame.device_name)
    ranks = dict.fromkeys(frame.world_size) if "world_size" in frame else {}
    if not ranks:  # of experiments: the name of the file, or of its folder, has the number
        ends = [name.rpartition("x")[2] for name in (path.stem, path.parent.name)]
        ranks = {next((end for end in ends if end.isdigit()), "1"): None}
    of = "ranks," if any("ranks each" in name for name in names) else "×"
    return f"{', '.join(ranks)} {of} {', '.join(names)}"


def _distinct(frame: pd.DataFrame, column: str) -> str:
    return " and ".join(one for one in dict.fromkeys(frame[column]) if one)


def columns() -> str:
    """Return a row per column of the CSVs of ``iris-bench run``, in their order: its name, and what it means."""
    described = inspect.cleandoc(Record.__doc__ or "").partition("Args:\n")[2]
    found = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", described, re.MULTILINE)
    lines = [
        [", ".join(f"`{name}`" for name in names.split(", ")), " ".join(meaning.split())] for names, meaning in found
    ]
    return table(["column", "meaning"], lines)


def measured() -> str:
    """Return a row per machine and folder: what is shown of its sweeps, at which commit, and when."""
    rows = sweeps()
    lines = []
    for machine in machines().values():
        shown = machine.rows
        for folder in sorted(shown.folder.unique(), reverse=True):
            here = shown[shown.folder == folder]
            problems = len(here.drop_duplicates(["family", "m", "n", "k"]))
            all_here = rows[rows.folder == folder]
            commits = _commits(all_here[all_here.world_size == machine.world_size])
            lines.append([machine.title, f"[{folder}](../results/{folder})", str(problems), str(len(here)), commits])
    return table(["GPUs", "folder", "problems", "rows", "commit"], lines)


def stress() -> str:
    """Return a row a run of ``iris-bench stress``, in the order in which they ended."""
    found = pd.concat([pd.read_csv(path) for path in csvs() if kind_of(path) is StressRecord])
    lines = []
    for row in rows_of(found.sort_values("timestamp", kind="stable")):
        gpus = f"{row.world_size} × {short_name(row.device_name)}"
        counts = [str(row.operators), f"{row.calls:,}", f"{row.elements:.2g}", str(row.mismatches)]
        lines.append([gpus, *counts, f"`{row.commit}`"])
    return table(["GPUs", "operators", "calls", "elements compared", "wrong", "commit"], lines)
