"""The fault board: failed waits, in host memory that every rank's kernels write and every rank's host reads.

A load shows the failure of any rank, also of one that has died since.

| words | written by | meaning |
|---|---|---|
| notice | any rank whose wait fails | nonzero: a wait has failed |
| for each rank: address | its host, once | where its heap starts, as it sees it |
| FAULT_ROWS rows | its kernels (sync.py) | the first failed wait of a program, or of one of those that share the row |
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from ..backends.base import Backend
from ..device.sync import FAULT_ROWS, FAULT_WORDS
from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.shared_memory import share_words

_ROWS = FAULT_ROWS.value
_ROW_WORDS = FAULT_WORDS.value
_RANK_WORDS = 1 + _ROWS * _ROW_WORDS
_WORD_BYTES = 8
_ARRIVAL_S = 1.0  # more than a record takes from a GPU to host memory, once the notice is there


class Fault(NamedTuple):
    """A failed wait; the order is that of interest: expired before aborted waits, then by time.

    Args:
        reason: EXPIRED or ABORTED.
        time_ns: on the clock of the device that waited.
        rank, program: the program that waited; -1 for a stream.
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


class FaultBoard:
    """All ranks' failed waits; making one is collective.

    Args:
        control_plane: all ranks.
        backend: whose kernels write it.
        heap_base: the address of this rank's heap.

    Attributes:
        words: this board's memory; the first is 0 until a wait of any rank has failed.
        notice_address, rows_address: of the words that this rank's kernels write.
    """

    def __init__(self, control_plane: ControlPlane, backend: Backend, heap_base: int) -> None:
        self._rank, world_size = control_plane.rank, control_plane.world_size
        self.words = share_words(control_plane, 1 + world_size * _RANK_WORDS, "iris_faults")
        with control_plane.collective_section("share the fault board with kernels"):
            self.notice_address = backend.share_with_kernels(torch.frombuffer(self.words, dtype=torch.int64))
        self.rows_address = self.notice_address + _WORD_BYTES * (1 + self._rank * _RANK_WORDS + 1)
        of_ranks = np.asarray(self.words)[1 : 1 + world_size * _RANK_WORDS].reshape(world_size, _RANK_WORDS)
        self._heap_bases = of_ranks[:, 0]
        self._rows = [words[1:].reshape(_ROWS, _ROW_WORDS) for words in of_ranks]  # of each rank
        self._heap_bases[self._rank] = heap_base

    def heap_base(self, rank: int) -> int:
        """Return the address at which a rank sees its own heap."""
        return int(self._heap_bases[rank])

    def faults(self) -> list[Fault]:
        """Return what has been recorded, in order of interest; wait a little if nothing has arrived yet."""
        deadline = time.monotonic() + _ARRIVAL_S
        while True:
            found = sorted(fault for rank in range(len(self._rows)) for fault in self._of(rank))
            if found or time.monotonic() > deadline:
                return found
            time.sleep(1e-3)

    def add(self, fault: Fault) -> None:
        """Record a wait of this rank that is no program's."""
        row = self._rows[self._rank][0]
        if row[0] == 0:
            row[1:] = fault.address, fault.expected, fault.seen, fault.program, fault.time_ns
            row[0] = fault.reason
        self.words[0] = 1

    def clear(self) -> None:
        """Forget this rank's faults, and the notice; no kernel of any rank may run."""
        self._rows[self._rank][:] = 0
        self.words[0] = 0

    def _of(self, rank: int) -> list[Fault]:
        rows = self._rows[rank]
        return [
            Fault(reason, time_ns, rank, program, address, expected, seen)
            for reason, address, expected, seen, program, time_ns in rows[rows[:, 0] != 0].tolist()
        ]
