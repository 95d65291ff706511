"""Follows every path through a kernel in Triton's GPU dialect: what is announced or loaded without its fence.

Loads and stores by tensor descriptor go through the async proxy, which neither an acquire nor a release orders (PTX
ISA, "Async proxy"): between an acquire and a load of what it has acquired, and between a store and the release that
announces it, there must be a fence. So must there be between threads' accesses to shared memory and an arrival that
lets a descriptor's load or store follow; and a barrier, as the arrival is one thread's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ACQUIRED = "acquired"  # and no fence since
STORED = "stored by descriptor"  # and not awaited and fenced since
UNFENCED = "shared memory accessed"  # by threads, and no fence since
APART = "threads apart"  # no barrier since some of them, or their multiplication, accessed shared memory

_State = frozenset[str]  # of what may be the case
_NOTHING: _State = frozenset()
_LOAD = re.compile(r"ttng\.async_tma_copy_global_to_local (%\w+)\[")
_STORE = "ttng.async_tma_copy_local_to_global"
_RELEASE = re.compile(r"tt\.atomic_rmw \w+, (?:release|acq_rel), |\"fence\.acq_rel\.")
_BARRIER = re.compile(r"^(?:gpu|ttg)\.barrier\b")
_ARRIVED = re.compile(r"cp\.async\.bulk\.wait_group 0; fence\.proxy\.async; ")


@dataclass
class Crossings:
    """What `follow` has seen.

    Args:
        loads: by one of the descriptors, by line.
        unfenced: loads, releases and arrivals that some path reaches without the fence, or the barrier.
    """

    loads: set[int] = field(default_factory=set)
    unfenced: set[str] = field(default_factory=set)


def follow(ttgir: str, descriptors: frozenset[str]) -> Crossings:
    """Follow all paths from a kernel's beginning.

    Args:
        ttgir: the kernel.
        descriptors: the arguments, by name, that name what peers write.
    """
    walk = _Walk(ttgir, {f"%{name}" for name in descriptors})
    begin = next(number for number, line in enumerate(walk.lines) if "tt.func public" in line)
    walk.block(begin + 1, _NOTHING)
    return walk.found


class _Walk:
    def __init__(self, ttgir: str, descriptors: set[str]) -> None:
        self.lines = [line.strip() for line in ttgir.splitlines()]
        self.descriptors = descriptors
        self.found = Crossings()

    def block(self, number: int, state: _State) -> tuple[int, _State]:
        """Follow a block from a line on; return the line that closes it, and what may be the case there."""
        while not self.lines[number].startswith("}"):
            line = self.lines[number]
            if line.startswith("ttg.warp_specialize("):
                number, state = self._roles(number, state)
            elif not line.endswith("{"):
                state = self._step(number, state)
                number += 1
            elif "scf.if" in line:
                end, then = self.block(number + 1, state)
                otherwise = state
                if self.lines[end] == "} else {":
                    end, otherwise = self.block(end + 1, state)
                number, state = end + 1, then | otherwise
            elif "scf.for" in line:
                number, state = self._loop(number, state)
            elif "scf.while" in line:
                number, state = self._while(number, state)
            else:
                assert line.endswith("({") or "tt.reduce" in line, line
                number, state = self.block(number + 1, state)
                number += 1
        return number, state

    def _loop(self, number: int, state: _State) -> tuple[int, _State]:
        end, after = self.block(number + 1, state)
        while not after <= state:
            state |= after
            end, after = self.block(number + 1, state)
        return end + 1, state

    def _while(self, number: int, state: _State) -> tuple[int, _State]:
        while True:
            middle, left = self.block(number + 1, state)
            end, after = self.block(middle + 1, left)
            if after <= state:
                return end + 1, left
            state |= after

    def _roles(self, number: int, state: _State) -> tuple[int, _State]:
        """Follow each role from the same state; they have names of their own for what they are given."""
        given = re.findall(r"%\w+", self.lines[number].split(")")[0])
        end, state_after = self.block(number + 2, state)
        while partition := re.match(r"partition\d+\((.*)\) num_warps", self.lines[end + 1]):
            names = [name for name, _ in re.findall(r"(%\w+): (\S)", partition.group(1))]
            assert len(names) == len(given)
            before = self.descriptors
            self.descriptors = {mine for mine, outer in zip(names, given, strict=True) if outer in before}
            end, _ = self.block(end + 2, state)
            self.descriptors = before
        return end + 1, state_after

    def _step(self, number: int, state: _State) -> _State:
        line = self.lines[number]
        if _STORE in line:
            return state | {STORED}
        if load := _LOAD.search(line):
            if load.group(1) in self.descriptors:
                self.found.loads.add(number)
                self._note(number, ACQUIRED in state)
        elif _RELEASE.search(line):
            self._note(number, STORED in state)
        elif "ttng.arrive_barrier" in line:
            self._note(number, bool(state & {UNFENCED, APART}))
        elif "ttg.local_load" in line or "ttg.local_store" in line:
            return state | {UNFENCED, APART}
        elif "ttng.warp_group_dot_wait" in line:
            return state | {APART}
        elif "ttng.fence_async_shared" in line:
            return state - {UNFENCED}
        elif _BARRIER.search(line):
            return state - {APART}
        elif "ld.acquire." in line:
            return state | {ACQUIRED}
        elif "fence.proxy.async" in line:
            return state - {ACQUIRED} - ({STORED} if _ARRIVED.search(line) else set())
        return state

    def _note(self, number: int, is_unfenced: bool) -> None:
        if is_unfenced:
            self.found.unfenced.add(self.lines[number])
