"""The host that a rank runs on: this process among others, unless the race checker simulates all ranks in one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..backends.base import Backend
from ..backends.select import select_backend
from ..heap.heap import SymmetricHeap
from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.rank_info import RankInfo, find_rank_info
from ..utils import settings
from ..watchdog.watchdog import Watchdog


class OpenContext(Protocol):
    """What a host knows of a context that is open on it."""

    control_plane: ControlPlane
    heap: SymmetricHeap
    watchdog: Watchdog


class ProcessGroup(NamedTuple):
    """torch's process group of some ranks.

    Args:
        group: torch's.
        leave: ends it, if it was made for them. Its argument says whether an error is on its way; then it only warns.
    """

    group: dist.ProcessGroup
    leave: Callable[[bool], None]


class TorchGroup:
    """torch's process group of a context's ranks, which `make` makes when it is first asked for; collective then.

    Attributes:
        made: it, or None.
    """

    def __init__(self, make: Callable[[], ProcessGroup]) -> None:
        self._make = make
        self.made: ProcessGroup | None = None

    def get(self) -> dist.ProcessGroup:
        """Return the group."""
        self.made = self.made or self._make()
        return self.made.group

    def leave(self, is_failing: bool) -> None:
        """End the group, if it was made for these ranks; with an error on its way only warn of what goes wrong."""
        if self.made is not None:
            self.made.leave(is_failing)


class Host(Protocol):
    """What a context asks of where it runs."""

    def check_vacant(self, group: dist.ProcessGroup | None) -> None:
        """Raise unless this rank may open a context: the only one, or one more, of a given group.

        Raises:
            RuntimeError: it has one, and no group is given; or this process was forked from a rank that has one.
        """

    def rank_info(self, group: dist.ProcessGroup | None) -> RankInfo:
        """Return this rank's place among those of `group`, or among all."""

    def timeout_s(self, asked: float | None) -> float:
        """Return the limit of waits by the clock in seconds, given what the caller asks for; 0 for none."""

    def connect(self, rank_info: RankInfo, timeout_s: float) -> ControlPlane:
        """Return the control plane of these ranks; `timeout_s` is the limit of a wait in a kernel."""

    def backend(self, rank_info: RankInfo, device: str) -> Backend:
        """Return the memory, device and streams of this rank."""

    def process_group(
        self, control_plane: ControlPlane, device: torch.device | None, given: dist.ProcessGroup | None
    ) -> ProcessGroup:
        """Return torch's process group of these ranks, on a GPU or, where that is None, gloo's; collective."""

    def occupy(self, context: OpenContext) -> Callable[[], None]:
        """Keep a context as this rank's own; return what ends that."""


class ProcessHost(Host):
    """A rank is this process."""

    rank_info = staticmethod(find_rank_info)
    timeout_s = staticmethod(settings.timeout_s)

    def __init__(self) -> None:
        self._contexts: list[OpenContext] = []

    def check_vacant(self, group: dist.ProcessGroup | None) -> None:
        for context in self._contexts:
            context.control_plane.check_owner()
        if self._contexts and group is None:
            raise RuntimeError(
                "this process has a context already; close() it before making another, or give the other one a process "
                "group of its ranks, group=..."
            )

    def connect(self, rank_info: RankInfo, timeout_s: float) -> ControlPlane:
        # The host waits twice as long: where a peer's kernel times out, the fault comes first.
        return ControlPlane.connect(rank_info.rank, rank_info.world_size, rank_info.address, timeout_s=2 * timeout_s)

    def backend(self, rank_info: RankInfo, device: str) -> Backend:
        return select_backend(device, rank_info.local_rank)

    def process_group(
        self, control_plane: ControlPlane, device: torch.device | None, given: dist.ProcessGroup | None
    ) -> ProcessGroup:
        from .process_group import make_process_group  # which is no part of the core

        return make_process_group(control_plane, device, given)

    def occupy(self, context: OpenContext) -> Callable[[], None]:
        self._contexts.append(context)
        return lambda: self._contexts.remove(context)


_current: Host = ProcessHost()


def current_host() -> Host:
    """Return the host that contexts of this process open on."""
    return _current


@contextlib.contextmanager
def on_host(host: Host) -> Iterator[None]:
    """Within the block, let contexts of this process open on another host."""
    global _current
    before, _current = _current, host
    try:
        yield
    finally:
        _current = before
