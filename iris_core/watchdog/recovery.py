"""Recovery: errors on all ranks or on none, and going on after them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from ..backends.base import Backend
from ..errors import AllocationMismatch, PeerError
from ..heap.allocator import first_difference
from ..heap.heap import SymmetricHeap
from ..rendezvous.control_plane import ControlPlane
from .call_log import CallLog
from .watchdog import UNTIL_RESET, Watchdog


class Recovery:
    """Finds out whether a context can be used, fails on all of its ranks at once, and resets them.

    `Context` has the same methods, with what each raises.

    Args:
        control_plane: all ranks.
        backend: whose kernels a reset ends.
        heap: whose memory is given back in sleep.
        watchdog: of this rank's waits.

    Attributes:
        is_closed: whether the context is; everything raises then.
        is_asleep: whether the heap has no memory; all raises that needs it.
    """

    _consequences: tuple[type[Exception], ...] = (PeerError,)  # what may follow from another failure

    def __init__(self, control_plane: ControlPlane, backend: Backend, heap: SymmetricHeap, watchdog: Watchdog) -> None:
        self._control_plane = control_plane
        self._backend = backend
        self._heap = heap
        self._allocator = heap.allocator
        self._watchdog = watchdog
        self._calls = CallLog(control_plane)
        self._pid = os.getpid()
        self.is_closed = self.is_asleep = False

    @property
    def has_failed(self) -> bool:
        """Whether a failure is known to this rank, which `reset` may mend."""
        return self._watchdog.failure is not None or self._control_plane.failure is not None

    def check_open(self) -> None:
        """Raise RuntimeError if the context is closed or asleep, or this process was forked from its own."""
        self._control_plane.check_owner()
        if self.is_closed:
            raise RuntimeError("this context is closed; iris_core.iris makes another")
        if self.is_asleep:
            raise RuntimeError("this context is asleep: its heap has no memory; call its wake() on every rank first")

    def check(self) -> None:
        """Raise if a wait has failed on any rank, or a collective on this one."""
        self.check_open()
        if not self._control_plane.is_lost:
            try:
                self._watchdog.check()
            except TimeoutError as error:
                self._control_plane.abort(str(error))
                raise
        if self._control_plane.failure is not None:
            hint = "this is final, start the ranks again" if self._control_plane.is_lost else UNTIL_RESET
            raise PeerError(f"{self._control_plane.failure}; {hint}")

    def barrier(self, synchronize: Callable[[], object] | None = None) -> None:
        """Wait for this rank's device, or for what `synchronize` waits for, then for all ranks."""
        with self.collective_section("reach the barrier"):
            (synchronize or self._backend.synchronize)()
            self.check()
        with self.raising_root_cause():
            self._compare_allocations()

    def reset(self) -> None:
        """Make the context usable again, wherever each rank failed; collective."""
        self.check_open()
        self._watchdog.abort()
        self._backend.synchronize()
        try:
            self._control_plane.rejoin()
        except PeerError as error:
            if self._control_plane.is_lost:
                self.check()
            raise PeerError(f"reset: {error}; {UNTIL_RESET}") from None
        self.start_anew("reset")
        self._watchdog.failure = None

    def start_anew(self, what: str) -> None:
        """Zero all flags and forget all faults and calls, in what is named for errors; collective."""
        with self._control_plane.collective_section(what):
            self._watchdog.clear()
            self._calls.clear()
            self._backend.synchronize()
        self._compare_allocations()

    @contextlib.contextmanager
    def raising_root_cause(self) -> Iterator[None]:
        """Run a block that uses the control plane; where it fails because a wait has failed, raise that."""
        self.check_open()
        try:
            yield
        except self._consequences:
            self.check()
            raise

    @contextlib.contextmanager
    def collective_section(self, what: str) -> Iterator[None]:
        """Run a block in which all ranks must succeed: as `ControlPlane.collective_section`, with the root cause."""
        with self.raising_root_cause(), self._control_plane.collective_section(what):
            yield

    @contextlib.contextmanager
    def collective_allocation(self, what: str) -> Iterator[None]:
        """Run a collective block that allocates; if it raises on one rank it raises on all, and allocates on none."""
        self.check()
        allocated, watched = self._allocator.snapshot(), list(self._watchdog.watched)
        try:
            with self.collective_section(what):
                yield
        except BaseException:
            self._allocator.restore(allocated)
            self._watchdog.watched = watched
            raise

    def note_call(self, what: object, digest: int, rows: int) -> None:
        """As `check`, and note a call that all ranks make alike; raise, here and then there, if a peer made another.

        Args:
            what: is called; its text is made where there is an error to raise.
            digest: of what is called.
            rows: with how many rows.

        Raises:
            ValueError: a peer's call of this number, or an earlier one, was another.
        """
        # Whether `check` has anything to raise, in one frame, as this is part of every call.
        watchdog, exchange = self._watchdog, self._control_plane.exchange
        has_failed = watchdog.board.words[0] or watchdog.failure is not None or exchange.failure is not None
        if has_failed or self.is_closed or self.is_asleep or os.getpid() != self._pid:
            self.check()
        if difference := self._calls.note(digest, rows):
            peer, call, own, others = difference
            if own[0] == others[0]:
                said = f"has {own[1]} rows of A over all ranks, rank {peer}'s has {others[1]}"
            else:
                said = f"is not what rank {peer} calls"
            which = what if own == (digest, rows) else "an earlier call"
            message = (
                f"{which}: call {call} of rank {self._control_plane.rank} {said}; all ranks must make the same calls, "
                "in the same order; with IRIS_DEBUG=1 they are compared ahead of each"
            )
            self._control_plane.abort(message)
            raise ValueError(f"{message}; {UNTIL_RESET}")

    def agree(self, what: str, value: Any) -> None:
        """Raise on every rank unless all ranks give the same value."""
        with self.raising_root_cause():
            self._control_plane.agree(what, value)

    def _compare_allocations(self) -> None:
        allocator = self._allocator
        if len(set(self._control_plane.all_gather(allocator.digest, "compare allocations"))) > 1:
            difference = first_difference(self._control_plane.all_gather(allocator.history, "find the difference"))
            raise AllocationMismatch(
                f"the ranks allocated differently since the last barrier: {difference}; allocation and free are "
                "collective, every rank must make the same calls in the same order"
            )
        allocator.agreed()
