"""The simulated host: all ranks of a machine in this process, each with a context of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..context.host import Host, OpenContext
from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.exchange import REJOIN, Exchange
from ..rendezvous.rank_info import RankInfo
from .device import CheckedBackend, Streams
from .simulation import Simulation


class SimulatedHost(Host):
    """What one process has for each rank that the checker simulates; the rank is the one whose task runs."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._simulation = streams.simulation

    def check_vacant(self, group: dist.ProcessGroup | None) -> None:
        if self._simulation.rank in self._simulation.contexts:
            raise RuntimeError("this process has a context already; close() it before making another")

    def rank_info(self, group: dist.ProcessGroup | None) -> RankInfo:
        if group is not None:
            _refuse_process_groups()
        rank = self._simulation.rank
        return RankInfo(rank, self._simulation.world_size, rank, "")

    def timeout_s(self, asked: float | None) -> float:
        return 0.0  # nothing waits by the clock: the scheduler sees when no task can go on

    def connect(self, rank_info: RankInfo, timeout_s: float) -> ControlPlane:
        return ControlPlane(rank_info.rank, rank_info.world_size, SimulatedExchange(self._simulation, rank_info.rank))

    def backend(self, rank_info: RankInfo, device: str) -> CheckedBackend:
        return CheckedBackend(self._streams, rank_info.rank)

    def process_group(
        self, control_plane: ControlPlane, device: torch.device | None, given: dist.ProcessGroup | None
    ) -> NoReturn:
        _refuse_process_groups()

    def occupy(self, context: OpenContext) -> Callable[[], None]:
        contexts, rank = self._simulation.contexts, self._simulation.rank
        contexts[rank] = context
        self._simulation.extents.watch(context.heap.allocator)

        def vacate() -> None:
            contexts.pop(rank, None)

        return vacate


class SimulatedExchange(Exchange):
    """Rounds of messages between the ranks of the simulated host; no sockets, and none fails."""

    timeout_s = 0.0

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._simulation = simulation
        self._rank = rank

    def exchange(self, what: str, value: Any, fds: Sequence[int] = ()) -> tuple[list[list[Any]], list[int]]:
        calls = self._simulation.gather(self._rank, [what, value, list(fds)])
        copies = [os.dup(fd) for _, _, of_rank in calls for fd in of_rank]
        if copies:
            self._simulation.gather(self._rank, None)  # before any rank closes its own
        return [[call, given] for call, given, _ in calls], copies

    def rejoin(self) -> None:
        self._simulation.gather(self._rank, [REJOIN, None, []])
        self.failure = None

    def abort(self, why: str) -> None:
        self.failure = self.failure or why

    def close(self) -> None:
        pass


def _refuse_process_groups() -> NoReturn:
    raise RuntimeError("the race checker's ranks are one process; torch's process groups are of several")
