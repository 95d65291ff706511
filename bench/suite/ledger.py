"""What of a plan is measured: a folder of CSVs, and beside them `measured.json`, which says how each ended."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..records.csv_rows import read_rows
from .plan import Entry

FILE = "measured.json"
LEAST_LEFT = 0.1  # of what was predicted, where it took longer than that before it was ended


@dataclass
class Ended:
    """How an entry ended, the last time.

    Args:
        state: "done"; "begun", of one that was ended before it was done; or "failed", for a `reason`.
        seconds: that it took, all times together.
    """

    state: str
    seconds: float
    reason: str = ""


class Ledger:
    """The entries that were begun in a folder, by name.

    Args:
        folder: of the CSVs; it need not be there yet.
        machine: whose measurements they are, such as "h200x4".
        commit: of what measures.

    Raises:
        ValueError: the folder has those of another machine.
    """

    def __init__(self, folder: Path, machine: str, commit: str) -> None:
        self.folder, self.machine, self.commit = folder, machine, commit
        path = folder / FILE
        found: dict[str, Any] = {"machine": machine, "entries": {}}
        if path.exists():
            found = json.loads(path.read_text())
        if found["machine"] != machine:
            raise ValueError(f"{folder} is of {found['machine']}, and this is {machine}; give another --out")
        self.entries = {name: Ended(**values) for name, values in found["entries"].items()}

    def csv(self, entry: Entry) -> Path:
        """Return an entry's file."""
        return self.folder / f"{entry.name}.csv"

    def log(self, entry: Entry) -> Path:
        """Return the file of what an entry's commands print."""
        return self.folder / "log" / f"{entry.name}.log"

    def state(self, entry: Entry) -> str:
        """Return "done", "begun", "failed", or "left" where it was not begun, or its file was removed."""
        ended = self.entries.get(entry.name)
        return ended.state if ended and (self.csv(entry).exists() or ended.state != "done") else "left"

    def left_s(self, entry: Entry, world_size: int) -> float:
        """Return how many seconds of an entry are left, by the plan."""
        predicted = entry.seconds(world_size)
        if self.state(entry) == "done":
            return 0.0
        return max(predicted - self._spent_s(entry), LEAST_LEFT * predicted)

    def in_order(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return what is left to do: what failed before comes last, so that it keeps nothing else from its turn."""
        left = [entry for entry in entries if self.state(entry) != "done"]
        return sorted(left, key=lambda entry: self.state(entry) == "failed")

    def end(self, entry: Entry, state: str, seconds: float, reason: str = "") -> None:
        """Write down how an entry ended, and what that took."""
        self.entries[entry.name] = Ended(state, round(self._spent_s(entry) + seconds, 1), reason)
        values = {name: asdict(ended) for name, ended in self.entries.items()}
        new = self.folder / f"{FILE}.new"
        written = {"machine": self.machine, "commit": self.commit, "entries": values}
        new.write_text(json.dumps(written, indent=2) + "\n")
        new.replace(self.folder / FILE)

    def _spent_s(self, entry: Entry) -> float:
        """Return how long the rows took that an entry goes on from, those of a run that failed, too."""
        goes_on = entry.resumes and self.state(entry) in ("begun", "failed")
        return self.entries[entry.name].seconds if goes_on else 0.0

    def rows(self, entry: Entry) -> int:
        """Return the number of rows of an entry's file."""
        path = self.csv(entry)
        return max(0, len(read_rows(path).rows) - 1) if path.exists() else 0

    def check_commits(self, entries: Sequence[Entry]) -> None:
        """Raise ValueError if a file of these entries has rows of another commit: all of a folder are of one."""
        others = {}
        for entry in entries:
            if found := _commits(self.csv(entry)) - {self.commit}:
                others[self.csv(entry).name] = ", ".join(sorted(found))
        if others:
            listed = "; ".join(f"{name} of {commits}" for name, commits in others.items())
            raise ValueError(
                f"this is commit {self.commit}, and {self.folder} has rows of others, with which these are not mixed: "
                f"{listed}; give another folder, as --out {self.folder}-{self.commit}, or remove these files"
            )


def _commits(path: Path) -> set[str]:
    """Return the commits that a file's rows are of."""
    if not path.exists() or not (found := read_rows(path)).rows:
        return set()
    if "commit" not in found.header:
        raise ValueError(f"{path} is not a CSV of iris-bench; remove it, or give another --out")
    column = found.header.index("commit")
    return {row[column] for _, row in found.rows[1:]}


def choose_folder(results: Path, machine: str, commit: str) -> Path:
    """Return the folder to measure into: the newest of this machine that was begun at this commit, or a new one.

    Args:
        results: the folder of all measurements.
        machine: its name, such as "h200x4".
        commit: of what measures.
    """
    begun = sorted(results.glob(f"????-??-??-{machine}*/{FILE}"), reverse=True)
    for path in begun:
        if json.loads(path.read_text())["commit"] == commit:
            return path.parent
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return results / f"{today}-{machine}"
