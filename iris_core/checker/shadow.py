"""What was last done to each byte: its last write, and the reads since that nothing orders among themselves.

Kept in pages, made as they are touched. All checks are by vector: an access of a block is one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .clocks import CTA, GPU, SYSTEM, WEAK, Agent, Clock, Clocks

_PAGE_BITS = 13  # larger ones are zeroed in vain: most kernels touch few bytes of each tensor
_PAGE_BYTES = 1 << _PAGE_BITS


@dataclass(frozen=True)
class Access:
    """One access by one agent: its stamp, where in the source, how strong.

    `lanes` are the elements that a program's access has at each byte, or 0: each is some thread's.
    """

    agent: Agent
    stamp: int
    site: int
    strength: int
    is_write: bool
    lanes: np.ndarray | int = 0

    def part(self, chosen: np.ndarray | slice) -> Access:
        """Return what it is of some of its bytes, or of all in another order."""
        if isinstance(self.lanes, int):
            return self
        return Access(self.agent, self.stamp, self.site, self.strength, self.is_write, self.lanes[chosen])


@dataclass(frozen=True)
class Conflict:
    """Two accesses to one byte that nothing orders."""

    address: int
    earlier: Access
    later: Access


class _Record:
    """An access a byte, or none where the stamp is zero."""

    def __init__(self) -> None:
        self.agent = np.zeros(_PAGE_BYTES, dtype=np.int32)
        self.stamp = np.zeros(_PAGE_BYTES, dtype=np.int32)
        self.site = np.zeros(_PAGE_BYTES, dtype=np.int32)
        self.strength = np.zeros(_PAGE_BYTES, dtype=np.int8)
        self.lane = np.zeros(_PAGE_BYTES, dtype=np.int32)

    def put(self, index: np.ndarray, access: Access) -> None:
        self.agent[index] = access.agent.id
        self.stamp[index] = access.stamp
        self.site[index] = access.site
        self.strength[index] = access.strength
        self.lane[index] = access.lanes

    def take(self, index: np.ndarray, other: _Record) -> None:
        for name, mine in vars(self).items():
            mine[index] = getattr(other, name)[index]


class _Page:
    def __init__(self) -> None:
        self.write = _Record()
        self.weak_write: _Record | None = None  # the last one, where `write` is stronger
        self.reads: list[_Record] = []  # a byte's readers are spread over them, one in each


class Shadow:
    """The record of all accesses to some range of memory."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._pages: dict[int, _Page] = {}

    def clear(self) -> None:
        """Forget all accesses: tens of MiB, that the cycles of a schedule's objects would keep until Python looks."""
        self._pages.clear()

    def access(self, addresses: np.ndarray, access: Access) -> Iterator[Conflict]:
        """Record an access to bytes at these addresses; yield a conflict for each access it races with."""
        known = self._clocks.known(access.agent)
        pages = addresses >> _PAGE_BITS
        first = int(pages[0])
        if (pages == first).all():
            yield from self._access_page(first, addresses & (_PAGE_BYTES - 1), access, known)
            return
        if (pages[1:] < pages[:-1]).any():
            order = np.argsort(pages, kind="stable")
            addresses, pages, access = addresses[order], pages[order], access.part(order)
        begins = [0, *(np.flatnonzero(pages[1:] != pages[:-1]) + 1), len(pages)]
        for here in itertools.starmap(slice, itertools.pairwise(begins)):
            page = int(pages[here.start])
            yield from self._access_page(page, addresses[here] & (_PAGE_BYTES - 1), access.part(here), known)

    def _access_page(self, number: int, index: np.ndarray, access: Access, known: Clock) -> Iterator[Conflict]:
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = _Page()
        base = number << _PAGE_BITS
        yield from self._conflicts(page.write, True, base, index, access, known)
        if page.weak_write is not None:
            yield from self._conflicts(page.weak_write, True, base, index, access, known)
        if access.is_write:
            for record in page.reads:
                yield from self._conflicts(record, False, base, index, access, known)
                record.stamp[index] = 0
            self._add_write(page, index, access)
        else:
            self._add_read(page, index, access, known)

    def _conflicts(
        self, record: _Record, is_write: bool, base: int, index: np.ndarray, access: Access, known: Clock
    ) -> Iterator[Conflict]:
        agents = record.agent[index]
        races = record.stamp[index] > known[agents]
        if not races.any():
            return
        same_program = self._clocks.program_of[agents] == self._clocks.program_of[access.agent.id]
        races &= ~same_program | (record.lane[index] != access.lanes)
        if access.strength != WEAK:
            needed = np.where(self._clocks.rank_of[agents] == access.agent.rank, GPU, SYSTEM)
            needed[same_program] = CTA
            races &= np.minimum(record.strength[index], access.strength) < needed
        for site in np.unique(record.site[index[races]]):
            at = int(index[races & (record.site[index] == site)][0])
            earlier = Access(
                self._clocks.agents[record.agent[at]],
                int(record.stamp[at]),
                int(site),
                int(record.strength[at]),
                is_write,
            )
            yield Conflict(base + at, earlier, access)

    @staticmethod
    def _add_write(page: _Page, index: np.ndarray, access: Access) -> None:
        """Keep a write in place of the last; a weak one stays beside a strong one, which races with fewer others."""
        if access.strength == WEAK:
            if page.weak_write is not None:
                page.weak_write.stamp[index] = 0
        elif (is_weak := (page.write.stamp[index] > 0) & (page.write.strength[index] == WEAK)).any():
            page.weak_write = page.weak_write or _Record()
            page.weak_write.take(index[is_weak], page.write)
        page.write.put(index, access)

    def _add_read(self, page: _Page, index: np.ndarray, access: Access, known: Clock) -> None:
        """Keep a read where nothing is kept, or in place of one that happens before it and is as strong or stronger.

        A write that races with the older read and not with the newer one cannot be.
        """
        for record in page.reads:
            agents, stamps = record.agent[index], record.stamp[index]
            free = (stamps <= known[agents]) | (agents == access.agent.id)
            free &= (stamps == 0) | (record.strength[index] >= access.strength)
            record.put(index[free], access.part(free))
            index, access = index[~free], access.part(~free)
            if not index.size:
                return
        page.reads.append(_Record())
        page.reads[-1].put(index, access)
