"""Two programs that each write a word and then look at the other's: on a GPU both may see the old value.

Schedules interleave accesses, so of the two at least one sees the other's write. Without a ``fence.sc``, which Triton
does not have, a write may reach the other rank after the look that follows it (PTX ISA, "Causality order"; the litmus
test is called store buffering). Over several schedules, each of two looks that misses the other's write in one of them
may miss it together with the other.

A program that polls sees the write in the end; so only looks that are not repeated count. Nor do those that are ordered
by a read-modify-write that acquires, of a word that was looked at by one that releases: of two such, one comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from .clocks import Agent, Clocks

Look = tuple[int, int]  # site, id of the program


@dataclass(frozen=True)
class _Write:
    time: int
    stamp: int
    acquires: bool


@dataclass(frozen=True)
class _Look:
    time: int
    site: int
    releases: bool


class StoreBuffers:
    """Follows the strong accesses of scalars in one schedule: writes, and looks that leave a word as it is.

    Attributes:
        missed: of two looks, by site and program, the one that missed the other program's write, and the other.
        repeated: sites of looks that were repeated.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._time = 0
        self._writes: dict[int, dict[int, list[_Write]]] = {}  # by word and program
        self._looks: dict[int, dict[int, _Look]] = {}  # by program and word, the first one
        self.missed: set[tuple[Look, Look]] = set()
        self.repeated: set[int] = set()

    def begin(self, program: Agent) -> None:
        """Forget what a program's agent did in an earlier kernel."""
        self._looks.pop(program.id, None)
        for writes in self._writes.values():
            writes.pop(program.id, None)

    def write(self, program: Agent, word: int, *, acquires: bool) -> None:
        """Record that a program's first thread writes a word."""
        assert program.first_thread is not None
        self._time += 1
        written = _Write(self._time, self._clocks.stamp(program.first_thread), acquires)
        self._writes.setdefault(word, {}).setdefault(program.id, []).append(written)

    def look(self, program: Agent, word: int, site: int, *, releases: bool) -> None:
        """Record that a program's first thread looks at a word; call it before what it acquires is known."""
        self._time += 1
        looks = self._looks.setdefault(program.id, {})
        if word in looks:
            self.repeated |= {site, looks[word].site}
            return
        now = looks[word] = _Look(self._time, site, releases)
        known = self._clocks.known(program)
        for other, writes in self._writes.get(word, {}).items():
            first = self._clocks.agents[other].first_thread
            assert first is not None
            if other == program.id:
                continue
            for written in writes:
                if written.stamp > known[first.id] and not (releases and written.acquires):
                    self._find_missed(program, word, now, other, written)

    def _find_missed(self, program: Agent, word: int, now: _Look, other: int, written: _Write) -> None:
        """Find looks of another program, after its write that is seen now, that missed a write of this program."""
        for elsewhere, look in self._looks.get(other, {}).items():
            if elsewhere == word or look.time < written.time:
                continue
            for own in self._writes.get(elsewhere, {}).get(program.id, ()):
                if own.time > look.time and not (look.releases and own.acquires):
                    self.missed.add(((look.site, other), (now.site, program.id)))
