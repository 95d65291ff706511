"""The reports of failed waits: a board in host memory that every rank's kernels write and every rank's host reads.

So a rank hears of any rank's failure at the price of a load, without asking anyone: also of a rank that has since died.

| words | written by | meaning |
|---|---|---|
| notice | whoever gives up waiting, on any rank | nonzero: a wait has failed |
| for each rank: address | its host, once | where its heap starts, as it sees it |
| REPORT_ROWS rows | its kernels (sync.py) | the first failed wait of a program, or of one of those that share the row |
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..backends.base import Backend, round_up
from ..device.sync import REPORT_ROWS, REPORT_WORDS
from ..rendezvous.control_plane import HostGroup
from ..rendezvous.shared_memory import share_memory

_ROWS = REPORT_ROWS.value
_ROW_WORDS = REPORT_WORDS.value
_RANK_WORDS = 1 + _ROWS * _ROW_WORDS
_WORD_BYTES = 8
_ARRIVAL_S = 1.0  # more than a report takes from a GPU to host memory, once the notice is there


class Report(NamedTuple):
    """A failed wait; the order is that of interest: expired before aborted waits, then by time.

    Args:
        reason: EXPIRED or ABORTED.
        time_ns: on the clock of the device that waited.
        rank, program: who waited; `program` is -1 for a stream.
        address: of the flag, as `rank` sees it.
        expected, seen: its value.
    """

    reason: int
    time_ns: int
    rank: int
    program: int
    address: int
    expected: int
    seen: int


class ReportBoard:
    """All ranks' reports; making one is collective.

    Args:
        group: all ranks.
        backend: whose kernels report.
        heap_base: the address of this rank's heap.

    Attributes:
        notice_address, rows_address: of the words that this rank's kernels write.
    """

    def __init__(self, group: HostGroup, backend: Backend, heap_base: int) -> None:
        self._rank = group.rank
        self._world_size = group.world_size
        size_bytes = round_up(_WORD_BYTES * (1 + group.world_size * _RANK_WORDS), mmap.PAGESIZE)
        memory = share_memory(group, size_bytes, "iris_reports")
        self._words = memoryview(memory).cast("q")
        with group.together("share the reports of failed waits with kernels"):
            self.notice_address = backend.share_with_kernels(torch.frombuffer(memory, dtype=torch.int64))
        self.rows_address = self.notice_address + _WORD_BYTES * (self._start(self._rank) + 1)
        self._words[self._start(self._rank)] = heap_base

    @property
    def has_failed(self) -> bool:
        """Whether a wait of any rank has failed."""
        return self._words[0] != 0

    def heap_base(self, rank: int) -> int:
        """Return the address at which a rank sees its own heap."""
        return self._words[self._start(rank)]

    def reports(self) -> list[Report]:
        """Return what has been reported, the most telling first; wait a little if nothing has arrived yet."""
        deadline = time.monotonic() + _ARRIVAL_S
        while True:
            found = sorted(report for rank in range(self._world_size) for report in self._of(rank))
            if found or time.monotonic() > deadline:
                return found
            time.sleep(1e-3)

    def add(self, report: Report) -> None:
        """Report a wait of this rank that is no program's."""
        row = self._start(self._rank) + 1
        if self._words[row] == 0:
            values = (report.address, report.expected, report.seen, report.program, report.time_ns)
            for word, value in enumerate(values, start=1):
                self._words[row + word] = value
            self._words[row] = report.reason
        self._words[0] = 1

    def clear(self) -> None:
        """Forget this rank's reports, and the notice; no kernel of any rank may run."""
        start = self._start(self._rank) + 1
        for word in range(start, start + _ROWS * _ROW_WORDS):
            self._words[word] = 0
        self._words[0] = 0

    def _start(self, rank: int) -> int:
        return 1 + rank * _RANK_WORDS

    def _of(self, rank: int) -> Iterator[Report]:
        start = self._start(rank) + 1
        for row in range(start, start + _ROWS * _ROW_WORDS, _ROW_WORDS):
            reason, address, expected, seen, program, time_ns = self._words[row : row + _ROW_WORDS]
            if reason:
                yield Report(reason, time_ns, rank, program, address, expected, seen)
