"""What the ranks of a context do together on the host, and how they go on when that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..backends.base import Backend
from ..errors import AllocationMismatch, PeerError
from ..heap.allocator import first_difference
from ..heap.heap import SymmetricHeap
from ..rendezvous.control_plane import ControlPlane
from .watchdog import UNTIL_RESET, Watchdog


class Meeting:
    """The part of a context that meets the other ranks."""

    control_plane: ControlPlane
    backend: Backend
    heap: SymmetricHeap
    watchdog: Watchdog
    is_closed = False

    def barrier(self) -> None:
        """Wait for this rank's device, then for all ranks.

        Raises:
            TimeoutError: a wait in a kernel of any rank passed its limit.
            AllocationMismatch: the ranks allocated or freed in different orders; names the first difference.
            PeerError: a rank died, or did not come within the limit.
        """
        with self.collective_section("reach the barrier"):
            self.backend.synchronize()
            self.check()
        with self.raising_root_cause():
            self._compare_allocations()

    def check(self) -> None:
        """Raise if this context cannot be used: a wait has failed, or ranks did not meet. Costs a few loads.

        Raises:
            TimeoutError: the wait that failed first, on whatever rank; `reset` makes the context usable again.
            PeerError: a rank did not come to something collective, which `reset` mends; or has gone, which it cannot.
            RuntimeError: it is closed, or this process was forked from the one that opened it.
        """
        self._check_open()
        if not self.control_plane.is_lost:
            try:
                self.watchdog.check()
            except TimeoutError as error:
                self.control_plane.abort(str(error))
                raise
        if self.control_plane.failure is not None:
            hint = "this is final, start the ranks again" if self.control_plane.is_lost else UNTIL_RESET
            raise PeerError(f"{self.control_plane.failure}; {hint}")

    def reset(self) -> None:
        """Make the context usable again after `check` has raised; collective, and no matter where each rank failed.

        Ends this rank's kernels, meets the peers, and zeroes every flag and counter that the watchdog watches: the
        device barrier's, all operators', and those given to ``watchdog.watch``. What was in operators' outputs, and
        calls under way, are lost; buffers stay. A captured graph can be replayed.

        Raises:
            PeerError: a rank has gone, which is final, or did not come within the limit: call this again.
            AllocationMismatch: the ranks allocated or freed in different orders.
        """
        self._check_open()
        self.watchdog.abort()
        self.backend.synchronize()
        try:
            self.control_plane.rejoin()
        except PeerError as error:
            if self.control_plane.is_lost:
                self.check()
            raise PeerError(f"reset: {error}; {UNTIL_RESET}") from None
        with self.control_plane.collective_section("reset"):
            self.watchdog.clear()
            self.backend.synchronize()
        self._compare_allocations()
        self.watchdog.failure = None

    @contextlib.contextmanager
    def raising_root_cause(self) -> Iterator[None]:
        """Do something with `control_plane`; where it fails because a wait has failed, that is what is raised."""
        self._check_open()
        try:
            yield
        except PeerError:
            self.check()
            raise

    @contextlib.contextmanager
    def collective_section(self, what: str) -> Iterator[None]:
        """As `ControlPlane.collective_section`, explained."""
        with self.raising_root_cause(), self.control_plane.collective_section(what):
            yield

    @contextlib.contextmanager
    def collective_allocation(self, what: str) -> Iterator[None]:
        """Do something collective that allocates; if it raises on one rank it raises on all, and allocates on none.

        What it gave the watchdog to watch is forgotten too.

        Raises:
            As `ControlPlane.collective_section`; and what `check` raises.
        """
        self.check()
        allocated, watched = self.heap.allocator.snapshot(), list(self.watchdog.watched)
        try:
            with self.collective_section(what):
                yield
        except BaseException:
            self.heap.allocator.restore(allocated)
            self.watchdog.watched = watched
            raise

    def agree(self, what: str, value: Any) -> None:
        """Raise on every rank unless all ranks give the same value (anything JSON holds); collective.

        Raises:
            ValueError: the values differ; names every rank's.
        """
        with self.raising_root_cause():
            self.control_plane.agree(what, value)

    def _check_open(self) -> None:
        self.control_plane.check_owner()
        if self.is_closed:
            raise RuntimeError("this context is closed; iris_core.iris makes another")

    def _compare_allocations(self) -> None:
        allocator = self.heap.allocator
        if len(set(self.control_plane.all_gather(allocator.digest, "compare allocations"))) > 1:
            difference = first_difference(self.control_plane.all_gather(allocator.history, "find the difference"))
            raise AllocationMismatch(
                f"the ranks allocated differently since the last barrier: {difference}; allocation and free are "
                "collective, every rank must make the same calls in the same order"
            )
        allocator.agreed()
