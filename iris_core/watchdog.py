"""The host's half of bounded waits: sets the limit, reads the report of a failed wait, says what it waited for.

The report lies in host memory that the device writes, so looking for one costs a load, not a synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .backends.base import Backend
from .heap import SymmetricHeap
from .sync import (
    ABORTED,
    REPORT_ROWS,
    REPORT_WORDS,
    WATCHDOG_ABORT,
    WATCHDOG_REPORT_ADDRESS,
    WATCHDOG_TIMEOUT_NS,
    WATCHDOG_WORDS,
)


class _Region(NamedTuple):
    start: int
    stop: int
    itemsize: int
    describe: Callable[[int], str]


class Watchdog:
    """Watches the waits of one rank's kernels.

    Args:
        heap: the symmetric heap; the watchdog's words lie there, where peers can write them.
        timeout_s: limit of a wait in seconds; 0 for none.
    """

    def __init__(self, heap: SymmetricHeap, backend: Backend, *, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._heap = heap
        self._reports = backend.host_visible(1 + REPORT_ROWS.value * REPORT_WORDS.value)
        self.words = heap.allocate((WATCHDOG_WORDS.value,), torch.int64)
        self.words[WATCHDOG_TIMEOUT_NS.value] = int(timeout_s * 1e9)
        self.words[WATCHDOG_ABORT.value] = 0
        self.words[WATCHDOG_REPORT_ADDRESS.value] = self._reports.data_ptr()
        self._regions: list[_Region] = []
        self._peers_told = False

    def watch(self, flags: torch.Tensor, describe: Callable[[int], str]) -> None:
        """Name the words of `flags` for reports: ``describe(i)`` says what element i stands for."""
        start = flags.data_ptr()
        self._regions.append(_Region(start, start + flags.nbytes, flags.element_size(), describe))

    def unwatch(self, flags: torch.Tensor) -> None:
        """Forget the words of `flags`."""
        self._regions = [region for region in self._regions if region.start != flags.data_ptr()]

    def check(self) -> None:
        """Raise if a wait of this rank has failed, and make the peers' waits give up.

        Raises:
            TimeoutError: what waited for what, how long, and what it saw.
        """
        if self._reports[0] == 0:
            return
        if not self._peers_told:
            self._peers_told = True
            self._abort_peers()
        raise TimeoutError(self._message())

    def _abort_peers(self) -> None:
        """Make every wait of the other ranks give up: this rank will not go on."""
        words = self._heap.peer_view(self.words)
        for peer in range(len(words)):
            if peer != self._rank:
                words[peer, WATCHDOG_ABORT.value] = 1

    def _message(self) -> str:
        rows = self._reports[1:].view(REPORT_ROWS.value, REPORT_WORDS.value)
        failed = sorted(row for row in rows.tolist() if row[0] != 0)  # expired waits first
        if not failed:
            return f"rank {self._rank}: a wait failed and its report was not complete"
        reason, address, expected, seen, program, _ = failed[0]
        why = (
            "gave up after another wait failed" if reason == ABORTED.value else f"waited {self._timeout_s:g} s in vain"
        )
        more = f"; {len(failed) - 1} more programs gave up too" if len(failed) > 1 else ""
        flag = self.find(address) or f"the flag at address {address:#x}"
        return (
            f"rank {self._rank}: program {program} {why} for {flag}: "
            f"expected at least {expected}, saw {seen}{more} (limit: IRIS_TIMEOUT_S)"
        )

    def find(self, address: int) -> str | None:
        """Return what the word at an address stands for, if it is watched."""
        for region in self._regions:
            if region.start <= address < region.stop:
                return region.describe((address - region.start) // region.itemsize)
        return None
