"""What was last done to each byte: its last write, and the reads since that nothing orders among themselves.

Kept in pages, made as they are touched. All checks are by vector: an access of a block is one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .clocks import GPU, SYSTEM, WEAK, Agent, Clocks

_PAGE_BITS = 16
_PAGE_BYTES = 1 << _PAGE_BITS


@dataclass(frozen=True)
class Access:
    """One access by one agent: its stamp, where in the source, how strong."""

    agent: Agent
    stamp: int
    site: int
    strength: int
    is_write: bool


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

    def put(self, index: np.ndarray, access: Access) -> None:
        self.agent[index] = access.agent.id
        self.stamp[index] = access.stamp
        self.site[index] = access.site
        self.strength[index] = access.strength


class _Page:
    def __init__(self) -> None:
        self.write = _Record()
        self.reads: list[_Record] = []  # a byte's readers are spread over them, one in each


class Shadow:
    """The record of all accesses to some range of memory."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._pages: dict[int, _Page] = {}

    def access(self, addresses: np.ndarray, access: Access) -> Iterator[Conflict]:
        """Record an access to bytes at these addresses; yield a conflict for each access it races with."""
        pages = addresses >> _PAGE_BITS
        first = int(pages[0])
        if (pages == first).all():
            yield from self._access_page(first, addresses & (_PAGE_BYTES - 1), access)
            return
        for page in np.unique(pages):
            yield from self._access_page(int(page), addresses[pages == page] & (_PAGE_BYTES - 1), access)

    def _access_page(self, number: int, index: np.ndarray, access: Access) -> Iterator[Conflict]:
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = _Page()
        base = number << _PAGE_BITS
        yield from self._conflicts(page.write, True, base, index, access)
        if access.is_write:
            for record in page.reads:
                yield from self._conflicts(record, False, base, index, access)
                record.stamp[index] = 0
            page.write.put(index, access)
        else:
            self._add_read(page, index, access)

    def _conflicts(
        self, record: _Record, is_write: bool, base: int, index: np.ndarray, access: Access
    ) -> Iterator[Conflict]:
        agents = record.agent[index]
        races = (record.stamp[index] > self._clocks.of(access.agent)[agents]) & (agents != access.agent.id)
        if not races.any():
            return
        if access.strength != WEAK:
            needed = np.where(self._clocks.rank_of[agents] == access.agent.rank, GPU, SYSTEM)
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

    def _add_read(self, page: _Page, index: np.ndarray, access: Access) -> None:
        """Keep a read where nothing is kept, or in place of one that happens before it.

        A write that races with the older read and not with the newer one cannot be.
        """
        clock = self._clocks.of(access.agent)
        for record in page.reads:
            agents = record.agent[index]
            free = (record.stamp[index] <= clock[agents]) | (agents == access.agent.id)
            record.put(index[free], access)
            index = index[~free]
            if not index.size:
                return
        page.reads.append(_Record())
        page.reads[-1].put(index, access)
