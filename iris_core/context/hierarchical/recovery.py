"""Recovery over several hosts: what fails on a host fails on all, and there is no going on after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

from ...errors import PeerError
from ...rendezvous.control_plane import ControlPlane
from ...watchdog.recovery import Recovery
from ..context import Context


class HierarchicalRecovery(Recovery):
    """As `Recovery`, of all ranks, by that of this host.

    Args:
        control_plane: of all ranks.
        local: the context of this host's ranks.
    """

    _consequences = (TimeoutError, PeerError)  # waits inside the host, too

    def __init__(self, control_plane: ControlPlane, local: Context) -> None:
        self._control_plane, self._local = control_plane, local
        self.is_closed = self.is_asleep = False

    @property
    def has_failed(self) -> bool:
        """Whether a failure is known to this rank."""
        return self._local.recovery.has_failed or self._control_plane.failure is not None

    def check(self) -> None:
        """Raise if a wait has failed on any rank, or a collective on this one: whichever was first, on any host.

        Ranks of a host that wait for one that has met with another host's failure time out after it.
        """
        self.check_open()
        try:
            self._local.check()
        except (TimeoutError, PeerError) as error:
            self._control_plane.abort(str(error))  # unless something has failed before
            if str(error) in str(self._control_plane.failure):
                raise
        self._control_plane.check()

    def barrier(self, synchronize: Callable[[], object] | None = None) -> None:
        """Wait for this rank's device, or for what `synchronize` waits for, then for all ranks."""
        with self.collective_section("reach the barrier"):
            self._local.recovery.barrier(synchronize)

    def reset(self) -> NoReturn:
        """Raise: there is no going on."""
        raise RuntimeError(
            "a context over several hosts cannot be reset, as collectives between hosts cannot be continued: close() "
            "it and, if all ranks live, make another"
        )

    @contextlib.contextmanager
    def collective_allocation(self, what: str) -> Iterator[None]:
        """Run a collective block that allocates; if it raises on one rank it raises on all, and allocates on none."""
        self.check()
        with self._local.collective_allocation(what), self.collective_section(what):
            yield

    def note_call(self, what: object, digest: int, rows: int) -> None:
        """As `check`, and note a call, which is compared with those of this host's ranks."""
        self.check()
        with self.raising_root_cause():
            self._local.recovery.note_call(what, digest, rows)
