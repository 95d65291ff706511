"""Running a plan: each entry's commands in processes of their own, within a time, in turn or side by side."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from ..measure.environment import VISIBLE
from .ledger import Ledger
from .plan import Entry

END_S = 20.0  # before the time is over commands are asked to end, and
GRACE_S = 15.0  # so much later killed, if their ranks have not ended
LEAST_S = 40.0  # less is not worth beginning with: ranks start, and the first kernels compile
MOST = 4.0  # times what was predicted, and
MOST_S = 120.0  # as much beside, an entry may take: more is a command that hangs
COMMAND = (sys.executable, "-m", "iris_bench")
_POLL_S = 0.2


@dataclass(frozen=True)
class Setting:
    """What all commands are started with.

    Args:
        world_size, device: as their options take them.
        slots: for each entry that runs at the same time, the GPUs that it sees, "0,1"; ("",) for one that sees all.
    """

    world_size: int
    device: str
    slots: tuple[str, ...] = ("",)


class Running:
    """An entry's commands, one after the other.

    Args:
        entry: whose.
        ledger: of the folder that they write to.
        setting: of all commands.
        gpus: that they see, by commas; "" for all.
    """

    def __init__(self, entry: Entry, ledger: Ledger, setting: Setting, gpus: str) -> None:
        self.entry, self.gpus = entry, gpus
        self.reason = ""  # why it failed
        self._ledger, self._setting = ledger, setting
        self._begun = time.monotonic()
        self._most_s = MOST * entry.seconds(setting.world_size) + MOST_S
        self._asked_to_end: float | None = None
        self._log = ledger.log(entry)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(b"")
        if not entry.resumes:
            ledger.csv(entry).unlink(missing_ok=True)
        self._left = iter(entry.commands)
        self._process = self._start(next(self._left))

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._begun

    def poll(self) -> str | None:
        """Return how it ended, "done", "begun" or "failed"; None while it runs."""
        status = self._process.poll()
        if status is None:
            self._heed_limits()
            return None
        if self._asked_to_end is not None:
            return "failed" if self.reason else "begun"
        if status not in (0, 1):  # of what makes no sense, or was ended from outside, nothing more is to be expected
            return self._failed(f"exit status {status}{self._last_line()}")
        if status:
            self._failed(f"something is wrong or failed{self._last_line()}")
        command = next(self._left, None)
        if command is None:
            return "failed" if self.reason else "done"
        self._process = self._start(command)
        return None

    def end(self) -> None:
        """Have its command write what it has, and end."""
        if self._asked_to_end is None:
            self._asked_to_end = time.monotonic()
            self._process.terminate()

    def _heed_limits(self) -> None:
        if self.seconds > self._most_s:
            self._failed(f"it took more than {self._most_s:.0f} s, {MOST:g} times what the plan says and {MOST_S:g} s")
            self.end()
        if self._asked_to_end is not None and time.monotonic() - self._asked_to_end > GRACE_S:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        out = str(self._ledger.csv(self.entry))
        words = [*shlex.split(command), "--world-size", str(self._setting.world_size)]
        words += ["--device", self._setting.device, "--out", out, *(["--resume"] if self.entry.resumes else [])]
        environment = os.environ | {"IRIS_COMMIT": self._ledger.commit}
        if self.gpus:
            environment |= {VISIBLE: self.gpus}
        with self._log.open("ab") as log:
            log.write(f"$ iris-bench {shlex.join(words)}\n".encode())
            log.flush()
            return subprocess.Popen(
                [*COMMAND, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _failed(self, reason: str) -> str:
        self.reason = self.reason or reason
        return "failed"

    def _last_line(self) -> str:
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.startswith("iris-bench: ")]
        return f": {said[-1].removeprefix('iris-bench: ')}" if said else ""


class Run:
    """A plan that runs.

    Args:
        entries: what is to be measured.
        ledger: of what is there.
        setting: of all commands.
        until: when, by time.monotonic, everything has ended; None for no such time.
        begun: called with an entry as it begins.
        ended: called with an entry, its state and reason as it ends.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        ledger: Ledger,
        setting: Setting,
        *,
        until: float | None,
        begun: Callable[[Entry], None],
        ended: Callable[[Entry, str, str], None],
    ) -> None:
        self.left = ledger.in_order(entries)
        self.running: list[Running] = []
        self._entries, self._ledger, self._setting, self._until = entries, ledger, setting, until
        self._begun, self._ended = begun, ended

    def run(self) -> Generator[None, None, None]:
        """Measure until all is done, or the time is over; yields a few times a second.

        Closing this iterator, as an interrupt does, ends what runs, and keeps what it has.
        """
        try:
            while True:
                self._begin()
                if not self.running:
                    return
                if self._time_s() < END_S:
                    self._end_all()
                    return
                yield
                time.sleep(_POLL_S)
                self._poll()
        finally:
            self._end_all()

    def left_s(self) -> float:
        """Return how many seconds are left, by the plan, if nothing ends it early."""
        waiting = sum(self._ledger.left_s(entry, self._setting.world_size) for entry in self.left)
        now = [max(0.0, self._of(one) - one.seconds) for one in self.running]
        return (waiting + sum(now)) / len(self._setting.slots)

    def _of(self, running: Running) -> float:
        return self._ledger.left_s(running.entry, self._setting.world_size)

    def _time_s(self) -> float:
        return float("inf") if self._until is None else self._until - time.monotonic()

    def _begin(self) -> None:
        """Begin what fits into the time, where there are GPUs for it."""
        free = [gpus for gpus in self._setting.slots if all(one.gpus != gpus for one in self.running)]
        time_s = self._time_s() - END_S
        for gpus in free:
            fitting = (entry for entry in self.left if self._needed_s(entry) <= time_s)
            if (entry := next(fitting, None)) is None:
                return
            self.left.remove(entry)
            self._begun(entry)
            self.running.append(Running(entry, self._ledger, self._setting, gpus))

    def _needed_s(self, entry: Entry) -> float:
        """Return the least time to begin an entry with: for all of it, if it is to start over the next time."""
        predicted = self._ledger.left_s(entry, self._setting.world_size)
        return min(predicted, LEAST_S) if entry.resumes else predicted

    def _poll(self) -> None:
        for one in list(self.running):
            if state := one.poll():
                self.running.remove(one)
                self._ledger.end(one.entry, state, one.seconds, one.reason)
                self._ended(one.entry, state, one.reason)

    def _end_all(self) -> None:
        for one in self.running:
            one.end()
        while self.running:
            self._poll()
            time.sleep(_POLL_S)


def slots(gpus: int, world_size: int) -> tuple[str, ...]:
    """Return the GPUs of each group of as many as there are ranks, by their numbers, for as many as there are."""
    count = gpus // world_size
    return tuple(",".join(str(first * world_size + index) for index in range(world_size)) for first in range(count))
