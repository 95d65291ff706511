"""Transfers between hosts: a rank and those at its place on the other hosts, joined by torch's process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...rendezvous.topology import Topology


class Transfer:
    """A message on its way to another host, and one from another.

    Args:
        works: torch's.
        tensors: that they read and write, which must live as long.
        fail: is called with what went wrong, and raises.
    """

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor], fail: Callable[..., Any]) -> None:
        self._works, self._tensors, self._fail = works, tensors, fail

    def wait(self) -> None:
        """Have the current stream wait for both; on a CPU, wait.

        Raises:
            PeerError: the other host died or is late; on every rank.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:  # of torch's
            self._fail(error)


class Rail:
    """The ranks at one place on every host. A transfer is queued behind the current stream, on a stream of its own.

    Args:
        topology: of all ranks.
        rank: this one.
        group: torch's process group of the rail's ranks, by host.
        report: raises, on every rank, what it is called with.
    """

    def __init__(
        self, topology: Topology, rank: int, group: dist.ProcessGroup, report: Callable[[str], NoReturn]
    ) -> None:
        self.topology = topology
        self.host, self.place = topology.host_of(rank), topology.place_of(rank)
        self.group = group
        self._ranks, self._report = topology.rail_of(rank), report

    def barrier(self, device: torch.device) -> None:
        """Queue a barrier of the rail's ranks on the current stream; on a CPU the host waits.

        Raises:
            PeerError: a host died or is late; on every rank.
        """
        try:
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        except RuntimeError as error:
            self._fail(range(self.topology.num_hosts), error)

    def exchange(self, to: int, sent: torch.Tensor, source: int, received: torch.Tensor) -> Transfer:
        """Send to the host `to`, and receive from the host `source`.

        All ranks of a rail make the same exchanges in the same order.

        Args:
            to, source: numbers of hosts; neither is this rank's.
            sent, received: contiguous, each as large as the peer says.
        """
        kinds = ((dist.isend, sent, to), (dist.irecv, received, source))
        operations = [  # of bytes, as not all of torch's backends have fp8
            dist.P2POp(op, tensor.view(torch.uint8), group=self.group, group_peer=host) for op, tensor, host in kinds
        ]

        def fail(error: RuntimeError) -> NoReturn:
            self._fail({to, source}, error)

        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            fail(error)
        return Transfer(works, (sent, received), fail)

    def _fail(self, hosts: Iterable[int], error: RuntimeError) -> NoReturn:
        named = self.topology.named(self._ranks[host] for host in hosts if host != self.host)
        place, _, said = " ".join(str(error).split()).rpartition("] ")  # where in torch, as "[pair.cc:553] ..."
        self._report(f"the exchange with {named} failed: {said or place}")
