"""Sees every access to device memory and finds pairs that nothing orders.

Two accesses to one byte race if one writes, they are by different agents or by different threads of a program, neither
happens before the other, and they are not both atomic (or volatile) in a scope that holds both. Which accesses a run
makes may depend on its schedule; whether two that it makes are ordered does not depend on which came first.
"""

from __future__ import annotations

import bisect
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import triton

from ..utils.user_lines import is_pythons, shown
from .clocks import GPU, SYSTEM, WEAK, Agent, Clocks, Releases, parts
from .shadow import Access, Conflict, Shadow
from .store_buffers import Look, StoreBuffers
from .unused import Frame, result_is_unused

_FRAMES_SHOWN, _FRAMES_KEPT = 4, 12  # of a place
_DEVICE_API = str(Path(__file__).resolve().parent.parent / "device") + os.sep
# Frames of these are how a kernel is run, not what it says.
_MACHINERY = tuple(
    str(Path(str(path)).resolve())
    for path in (
        Path(triton.__file__).parent,
        Path(torch.__file__).parent,
        Path(__file__).parent,
        Path(__file__).parent.parent / "interpreter",
        Path(__file__).parent.parent / "device" / "intrinsics.py",
    )
)
_OF_WATCHDOG = ("has_aborted", "record_failure")  # of the device API, whose words all write without an order
_SCOPES = {WEAK: "", GPU: " in its GPU", SYSTEM: " in the system"}


Place = tuple[str, tuple[Frame, ...]]  # who, and where in the source: a site's frames


@dataclass(frozen=True)
class Race:
    """Two accesses to one byte, at least one of them a write, that nothing orders.

    Args:
        where: what lies there.
        earlier, later: the accesses, as this schedule had them.
        sites: both places in the source, in the order of the alphabet.
        schedule: in which it was found first.
    """

    where: str
    earlier: str
    later: str
    sites: tuple[str, str]
    schedule: str

    def __str__(self) -> str:
        return f"race at {self.where}, schedule {self.schedule}:\n  {self.earlier}\n  {self.later}"


class _Launch(NamedTuple):
    """A launch of a kernel by a rank, its number from 1 on, and an agent's first stamp in it."""

    since: int
    kernel: str
    number: int


class Detector:
    """Follows what happens before what, over all ranks.

    Args:
        describe: says what lies at an address.
    """

    def __init__(self, describe: Callable[[int], str]) -> None:
        self._describe = describe
        self.clocks = Clocks()
        self.releases = Releases(self.clocks)
        self.store_buffers = StoreBuffers(self.clocks)
        self.accesses = 0
        self._shadow = Shadow(self.clocks)
        self._sites: dict[tuple[Frame, ...], int] = {}
        self._frames: list[tuple[Frame, ...]] = []
        self._ours: dict[str, bool] = {}
        self._unused: dict[int, bool] = {}
        self._launched: Counter[tuple[int, str]] = Counter()  # by rank and kernel
        self._launches: dict[int, list[_Launch]] = {}  # of an agent
        self.vain_acquires: dict[int, Agent] = {}  # by site, the first agent
        self.strays: dict[int, tuple[Agent, str]] = {}  # by site, the first agent, and what it did where
        self.conflicts: dict[tuple[int, int], tuple[str, Conflict]] = {}  # by both sites, with what lies there

    def count_launch(self, rank: int, kernel: str) -> int:
        """Return the number of a launch of a kernel by a rank, from 1 on."""
        self._launched[rank, kernel] += 1
        return self._launched[rank, kernel]

    def begin(self, program: Agent, kernel: str, launch: int) -> None:
        """Note that what a program does from now on is of this launch."""
        self.store_buffers.begin(program)
        for part in parts(program):
            self._launches.setdefault(part.id, []).append(_Launch(self.clocks.stamp(part), kernel, launch))

    def access(
        self,
        agent: Agent,
        addresses: np.ndarray,
        itemsize: int,
        site: int,
        *,
        write: bool,
        strength: int = WEAK,
        lanes: np.ndarray | None = None,
        values: np.ndarray | None = None,
    ) -> None:
        """Record an access to items at these addresses.

        Args:
            agent: who; for a program's first thread alone, that.
            addresses: of the items.
            itemsize: bytes an item.
            site: where in the source.
            write, strength: of which kind.
            lanes: a program's elements that access them: the same one is the same thread's.
            values: that are stored, where two at one address race.
        """
        if not addresses.size:
            return
        self.accesses += 1
        in_bytes = (addresses.astype(np.int64).reshape(-1, 1) + np.arange(itemsize)).reshape(-1)
        by_byte = 0 if lanes is None else np.repeat(lanes, itemsize)
        access = Access(agent, self.clocks.stamp(agent), site, strength, write, by_byte)
        for conflict in self._shadow.access(in_bytes, access):
            self._found(conflict)
        if values is not None and (twice := _stored_twice(addresses, values)) is not None:
            self._found(Conflict(twice, access, access))
        if write and strength == WEAK:
            self.releases.overwritten(in_bytes)

    def end(self) -> None:
        """Let go of the memory's record, of which nothing is asked after the last access."""
        self._shadow.clear()

    def _found(self, conflict: Conflict) -> None:
        first, second = sorted((conflict.earlier.site, conflict.later.site))
        if (first, second) not in self.conflicts:
            self.conflicts[first, second] = (self._describe(conflict.address), conflict)

    def result_is_unused(self, site: int) -> bool:
        """Return whether nothing uses the result of the atomic at a site."""
        if site not in self._unused:
            self._unused[site] = result_is_unused(self._frames[site])
        return self._unused[site]

    def site(self) -> int:
        """Return a number for the caller's place in the source: the innermost lines that are not machinery."""
        frame = sys._getframe(1)
        found: list[Frame] = []
        while frame is not None and len(found) < _FRAMES_KEPT:
            name = frame.f_code.co_filename
            if self._is_shown(name):
                found.append((name, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        key = tuple(found)
        if key not in self._sites:
            self._sites[key] = len(self._frames)
            self._frames.append(key)
        return self._sites[key]

    def missed_looks(self) -> set[tuple[Place, Place]]:
        """Return pairs of looks at flags, of which the first missed what the other's program had to write."""
        buffers = self.store_buffers

        def place(look: Look) -> Place:
            return self.clocks.agents[look[1]].name, self._frames[look[0]]

        return {
            (place(first), place(second))
            for first, second in buffers.missed
            if not {first[0], second[0]} & buffers.repeated
        }

    def describe_site(self, site: int) -> str:
        """Return a site as text: see `_described`."""
        return _described(self._frames[site])

    def is_of_watchdog(self, site: int) -> bool:
        """Return whether a site is of the watchdog's own words, and not of a flag that a kernel waits for."""
        return any(fn in _OF_WATCHDOG and _is_device_api(name) for name, _, fn in self._frames[site])

    def describe_raise_site(self, error: BaseException) -> str:
        """Return where an exception was raised, as text like a site's; nothing if that was in machinery alone."""
        frames = [
            (frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if self._is_shown(frame.f_code.co_filename)
        ]
        return _described(frames[::-1])

    def describe(self, conflict: Conflict) -> tuple[str, str]:
        """Return both accesses as text."""
        program_of = self.clocks.program_of
        earlier, later = conflict.earlier, conflict.later
        threads = ("a thread of ", "another thread of ")
        if program_of[earlier.agent.id] != program_of[later.agent.id]:
            threads = ("", "")
        return self._describe_access(earlier, threads[0]), self._describe_access(later, threads[1])

    def _describe_access(self, access: Access, thread: str) -> str:
        kind = "write" if access.is_write else "read"
        strength = f"atomic{_SCOPES.get(access.strength, '')} " if access.strength != WEAK else ""
        who = f"{thread}{access.agent.name}{self._describe_launch(access)}"
        return f"{strength}{kind} by {who} at {self.describe_site(access.site)}"

    def _describe_launch(self, access: Access) -> str:
        """Return which launch an access is of, where some rank launched that kernel several times."""
        launches = self._launches.get(access.agent.id, [])
        if not (begun := bisect.bisect_right(launches, access.stamp, key=lambda launch: launch.since)):
            return ""
        _, kernel, number = launches[begun - 1]
        most = max(number for (_, name), number in self._launched.items() if name == kernel)
        return f" in launch {number} of {kernel}" if most > 1 else ""

    def _is_shown(self, file: str) -> bool:
        if file not in self._ours:
            self._ours[file] = not is_pythons(file) and not os.path.realpath(file).startswith(_MACHINERY)
        return self._ours[file]


def _stored_twice(addresses: np.ndarray, values: np.ndarray) -> int | None:
    """Return an address that gets two values, if there is one."""
    if (np.diff(addresses) > 0).all():
        return None
    order = np.argsort(addresses, kind="stable")
    addresses, values = addresses[order], values[order]
    one, next_one = values[:-1], values[1:]
    both_nan = (one != one) & (next_one != next_one)
    twice = (np.diff(addresses) == 0) & (one != next_one) & ~both_nan
    return int(addresses[1:][twice][0]) if twice.any() else None


def describe_place(place: Place) -> str:
    """Return who was where, as text."""
    name, frames = place
    return f"{name} at {_described(frames)}"


def _is_device_api(file: str) -> bool:
    return os.path.realpath(file).startswith(_DEVICE_API)


def _described(frames: Sequence[Frame]) -> str:
    """Return frames as text, the innermost first. Of the device API's, that a kernel called stands for those inside."""
    kept: list[Frame] = []
    for frame in frames:
        if kept and _is_device_api(frame[0]) and _is_device_api(kept[-1][0]):
            kept.pop()
        kept.append(frame)
    return ", called from ".join(f"{shown(name)}:{line} ({fn})" for name, line, fn in kept[:_FRAMES_SHOWN])
