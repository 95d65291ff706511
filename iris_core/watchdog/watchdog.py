"""The host's half of bounded waits: sets the limit, finds failed waits, names what they waited for, and resets."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..backends.base import Backend
from ..device.sync import (
    EXPIRED,
    WATCHDOG_ABORT,
    WATCHDOG_FAULTS_ADDRESS,
    WATCHDOG_NOTICE_ADDRESS,
    WATCHDOG_TIMEOUT_NS,
    WATCHDOG_WORDS,
)
from ..heap.heap import SymmetricHeap
from ..rendezvous.control_plane import ControlPlane
from .fault_board import Fault, FaultBoard

UNTIL_RESET = "the context cannot be used until every rank has called its reset(), which none can that has ended"


class Watched(NamedTuple):
    """Flags that kernels wait on, and their descriptions."""

    flags: torch.Tensor
    describe: Callable[[int, int], str]
    call_of: Callable[[int, int], int] | None

    def name(self, address: int, rank: int, expected: int | None = None) -> str | None:
        """Return what a rank's word stands for, given where this rank has it; None if it is none of these.

        In which call, too, if `expected` is known.
        """
        word, rest = divmod(address - self.flags.data_ptr(), self.flags.element_size())
        if rest or not 0 <= word < self.flags.numel():
            return None
        call = f", in call {self.call_of(word, expected)}" if self.call_of and expected is not None else ""
        return f"{self.describe(word, rank)}{call}"


class Watchdog:
    """Watches the waits of one rank's kernels; making one is collective.

    Args:
        control_plane: all ranks.
        heap: the symmetric heap; the watchdog's words lie there, where peers can write them.
        backend: whose kernels wait.
        timeout_s: limit of a wait in seconds; 0 for none.

    Attributes:
        words: what `wait` of the device API takes as `watchdog_ptr`.
        board: what waits have failed, of all ranks.
        failure: what `check` raises since a wait of any rank has failed, or None.
    """

    def __init__(self, control_plane: ControlPlane, heap: SymmetricHeap, backend: Backend, *, timeout_s: float) -> None:
        self._rank = control_plane.rank
        self._timeout_s = timeout_s
        self._heap = heap
        self._backend = backend
        self.board = FaultBoard(control_plane, backend, heap.base)
        self.failure: str | None = None
        self.words = heap.allocate((WATCHDOG_WORDS.value,), torch.int64)
        self.watched: list[Watched] = []
        self.clear()

    def watch(
        self,
        flags: torch.Tensor,
        describe: Callable[[int, int], str],
        call_of: Callable[[int, int], int] | None = None,
    ) -> None:
        """Name the words of `flags` for error messages, and have a reset zero them.

        The rank that raises names what any rank waited for: that one may be busy, or gone.

        Args:
            flags: contiguous int64 words, or int32 ones for a stream, on the context's device. Errors name
                those on the heap on every rank; of others they name the rank alone.
            describe: ``describe(i, rank)`` says what element i stands for on `rank`, any of the ranks.
            call_of: ``call_of(i, expected)`` gives the call in which element i is expected to be that.

        Raises:
            ValueError: the flags are no such words, or `describe` does not take two arguments.
        """
        _refuse_what_cannot_be_watched(flags, self.words.device)
        if not _takes(describe, 2):
            raise ValueError(f"describe is {describe!r}; it takes a function of an element's index and a rank")
        if call_of is not None and not _takes(call_of, 2):
            raise ValueError(f"call_of is {call_of!r}; it takes a function of an element's index and a value")
        self.watched.append(Watched(flags, describe, call_of))

    def unwatch(self, flags: torch.Tensor, size: int | None = None) -> None:
        """Forget the words that begin in `flags`, or in so many bytes from there on."""
        start = flags.data_ptr()
        stop = start + max(1, flags.nbytes if size is None else size)
        self.watched = [one for one in self.watched if not start <= one.flags.data_ptr() < stop]

    def check(self) -> None:
        """Raise if a wait of any rank has failed; the first time, abort all ranks' waits.

        Raises:
            TimeoutError: what waited for what, how long, and what it saw; the same until the reset.
        """
        if self.failure is None:
            if not self.board.words[0]:
                return
            self.failure = self._message()
            self.abort()
        raise TimeoutError(self.failure)

    def abort(self) -> None:
        """Abort every wait, on all ranks, though their devices are busy."""
        self._backend.write_words(self._heap.peer_view(self.words)[:, WATCHDOG_ABORT.value], 1)

    def stream_timed_out(self, flag: torch.Tensor, expected: int) -> None:
        """Record that a stream's wait for a word to be at least `expected` has timed out."""
        now = time.monotonic_ns()
        self.board.add(Fault(EXPIRED.value, now, self._rank, -1, flag.data_ptr(), expected, int(flag.item())))

    def poll_failure(self, address: int, waited_s: float) -> str | None:
        """Return what to raise of an interpreted kernel's loop that polls a word; None while it may go on."""
        if not self._timeout_s or waited_s <= self._timeout_s:
            return None
        what = self.find(address) or self._heap.describe(address) or f"the word at address {address:#x}"
        return (
            f"a loop polled {what}, for {self._timeout_s:g} s and it did not change (limit: iris(timeout_s=...) or "
            "IRIS_TIMEOUT_S)"
        )

    def clear(self) -> None:
        """Set this object's own words, zero every watched one, and forget the faults; no kernel of any rank may run."""
        for one in self.watched:
            one.flags.zero_()
        self.words[WATCHDOG_TIMEOUT_NS.value] = int(self._timeout_s * 1e9)
        self.words[WATCHDOG_ABORT.value] = 0
        self.words[WATCHDOG_FAULTS_ADDRESS.value] = self.board.rows_address
        self.words[WATCHDOG_NOTICE_ADDRESS.value] = self.board.notice_address
        self.board.clear()

    def _message(self) -> str:
        faults = self.board.faults()
        if not faults:
            return f"a wait of some rank has failed and its record has not arrived; {UNTIL_RESET}"
        first = faults[0]
        own = next((fault for fault in faults if fault.rank == self._rank), first)
        others = sorted({fault.rank for fault in faults} - {first.rank, self._rank})
        parts = [f"{self._describe(first)} (limit: iris(timeout_s=...) or IRIS_TIMEOUT_S)"]
        if own is not first:
            parts.append(f"on this rank, {self._describe(own)}")
        if others:
            parts.append(f"waits of rank(s) {', '.join(map(str, others))} failed too")
        return "; ".join([*parts, UNTIL_RESET])

    def _describe(self, fault: Fault) -> str:
        why = (
            f"timed out after {self._timeout_s:g} s waiting"
            if fault.reason == EXPIRED.value
            else "was aborted, as another wait had failed or a rank has left, waiting"
        )
        who = f"program {fault.program}" if fault.program >= 0 else "a stream"
        what = f"{self._describe_flag(fault)}: expected at least {fault.expected}, saw {fault.seen}"
        return f"rank {fault.rank}: {who} {why} for {what}"

    def find(self, address: int, rank: int | None = None, expected: int | None = None) -> str | None:
        """Return what a rank's word, this one's without `rank`, stands for, if it is watched; see `Watched.name`."""
        names = (one.name(address, self._rank if rank is None else rank, expected) for one in self.watched)
        return next((name for name in names if name), None)

    def _describe_flag(self, fault: Fault) -> str:
        """Say what a flag stands for. On the heap it stands for the same on every rank; others are their rank's own."""
        address, where = fault.address, f"address {fault.address:#x}"
        offset = address - self.board.heap_base(fault.rank)
        if 0 <= offset < self._heap.stride:
            address = self._heap.base + offset
            where = f"{self._heap.allocator.describe(offset)}, on rank {fault.rank}'s heap"
        elif fault.rank != self._rank:
            return f"a flag of rank {fault.rank}'s own"
        return self.find(address, fault.rank, fault.expected) or f"the flag at {where}"


def _refuse_what_cannot_be_watched(flags: torch.Tensor, device: torch.device) -> None:
    """Raise unless these are words that a wait can wait for."""
    if not isinstance(flags, torch.Tensor):
        raise ValueError(f"flags are {flags!r}; watch takes a tensor of int64 words, such as ctx.zeros gives")
    given = f"{tuple(flags.shape)} of {flags.dtype} on {flags.device}"
    if flags.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"flags are {given}; kernels wait for torch.int64 words, streams for torch.int32 ones")
    if not flags.is_contiguous():
        raise ValueError(f"flags are {given} with strides {flags.stride()}; watch takes contiguous ones")
    if flags.device != device:
        raise ValueError(f"flags are {given}; kernels of this context wait for words on {device}")


def _takes(fn: Callable[..., object], count: int) -> bool:
    """Return whether a function can be called with so many arguments, as far as it says what it takes."""
    if not callable(fn):
        return False
    try:
        inspect.signature(fn).bind(*range(count))
    except ValueError:  # a builtin that does not say
        return True
    except TypeError:
        return False
    return True
