"""The context of ranks on several hosts: that of each host's ranks, and torch's process groups between hosts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...device import interpretation
from ...rendezvous.control_plane import ControlPlane
from ...rendezvous.rank_info import RankInfo
from ...rendezvous.topology import Topology
from ...utils.settings import asked_device
from ..context import Context
from ..host import ProcessGroup
from ..options import ContextOptions
from ..process_group import make_process_group, new_group
from .rail import Rail
from .recovery import HierarchicalRecovery
from .store_exchange import StoreExchange

NCCL_SMS = 8  # that kernels leave to NCCL's between hosts, unless the caller reserves others
_CTAS_PER_SM = 2  # of NCCL's
_BEYOND_LIMIT = 4  # times the limit of the host is NCCL's, at which torch ends the process: the host's comes first


class HierarchicalContext(Context):
    """One rank's handle on ranks that live on several hosts. `iris_core.iris` makes it where they do.

    Ranks and their number are those of all hosts. A symmetric heap is a host's: `local` is the context of this host's
    ranks, whose kernels reach each other's memory; between hosts are torch's process groups, NCCL's, RCCL's or gloo's.
    What `Context` has that needs one heap over all ranks raises RuntimeError. A failure on any host is raised on all,
    and is final.

    Attributes:
        topology: hosts × ranks.
        local: the context of this host's ranks; it keeps SMs free for the kernels between hosts.
        rail: transfers to the ranks at this one's place on the other hosts.
    """

    def _connect(self) -> ControlPlane:
        rank_info = self._rank_info
        assert rank_info.store is not None
        self.topology = Topology.of(rank_info.hosts)
        self._of_hosts: list[ProcessGroup] = []
        self._is_leaving = False
        self._exchange = StoreExchange(
            rank_info.rank,
            self.topology,
            dist.PrefixStore("exchange", rank_info.store),
            timeout_s=2 * self.timeout_s,
            on_failure=self._abort_groups,
        )
        return ControlPlane(rank_info.rank, rank_info.world_size, self._exchange)

    def _open(self, options: ContextOptions, opened: contextlib.ExitStack) -> None:
        options.agree(self.control_plane)
        with self.control_plane.collective_section("open a context on each host"):
            on_gpu = asked_device(options.device) != "cpu" and torch.cuda.is_available()
            if on_gpu and not interpretation.is_enabled():
                options = replace(options, reserve_sms=options.reserve_sms or NCCL_SMS)
            self.local = Context(self._host, _within_host(self._rank_info, self.topology), options)
            opened.callback(self._close_local)
        self.reserve_sms = self.local.reserve_sms
        self.backend, self.heap, self.watchdog = self.local.backend, self.local.heap, self.local.watchdog
        self.profiler_range, self.ranks_on_device = self.local.profiler_range, self.local.ranks_on_device
        self.recovery = HierarchicalRecovery(self.control_plane, self.local)
        self.control_plane.agree("the device", self.backend.name)
        self._make_groups(opened)
        self.barrier()

    def _make_groups(self, opened: contextlib.ExitStack) -> None:
        """Make torch's groups of this host's ranks and of the rail's."""
        ranks = dist.get_process_group_ranks(self.process_group())
        own, device = self.get_rank(), None if self.is_interpreted() else self.get_device()
        limit_s = self._limit_s(device)

        def made(members: Sequence[int], **options: Any) -> ProcessGroup:
            of_torch = [ranks[member] for member in members]
            group = new_group(of_torch, device, limit_s, use_local_synchronization=True, **options)
            opened.callback(lambda: group.leave(self._is_leaving))
            self._of_hosts.append(group)
            return group

        self.local.torch_group.made = made(self.topology.ranks_of(self.topology.host_of(own)))
        options = {} if device is None else {"pg_options": _nccl_options(self.reserve_sms)}
        rail = made(self.topology.rail_of(own), **options)
        self.rail = Rail(self.topology, own, rail.group, self._exchange.report)

    def _limit_s(self, device: torch.device | None) -> float:
        """Return how long collectives of torch's wait for a rank."""
        return self._exchange.timeout_s * (1 if device is None else _BEYOND_LIMIT)

    def _make_process_group(self) -> ProcessGroup:
        device = None if self.is_interpreted() else self.get_device()
        given, store = self._rank_info.group, self._rank_info.store
        return make_process_group(self.control_plane, device, given, store, limit_s=self._limit_s(device))

    def _abort_groups(self) -> None:
        """End what waits for other hosts: kernels of NCCL's, which have no limit of their own.

        All groups at once: the end of one waits for the device, and so for the others' kernels.
        """
        groups = [made.group for made in (self.torch_group.made, *self._of_hosts) if made is not None]
        threads = [threading.Thread(target=self._abort, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._exchange.timeout_s or None)

    def _abort(self, group: dist.ProcessGroup) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            group._get_backend(self.get_device()).abort()

    def _close_local(self) -> None:
        self.local._close(is_failing=self._is_leaving or self._exchange.failure is not None)

    def device_barrier(self, group: Any = None) -> None:
        """Queue a barrier of all ranks on the current stream; on a CPU the host waits.

        Raises:
            ValueError: a group is given; those of ``ccl.new_group`` are of one host.
            TimeoutError, PeerError: see `check`.
        """
        if group is not None:
            raise ValueError("group is of one host's ranks; give it to ctx.local.device_barrier")
        self.check()
        self.local.device_barrier()
        self.rail.barrier(self.get_device())
        self.local.device_barrier()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return the value of rank `src` on every rank; collective. Tensors go by `process_group`.

        Args:
            value: a dense tensor, or anything JSON holds; others than the source may pass None.
            src: the rank whose value is taken.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= src < self.get_num_ranks():
            raise ValueError(f"src is {src}; it takes a rank from 0 to {self.get_num_ranks() - 1}")
        is_tensor = isinstance(value, torch.Tensor)
        described = [list(value.shape), str(value.dtype).removeprefix("torch.")] if is_tensor else None
        shape_and_dtype, plain = self.control_plane.broadcast([described, None if is_tensor else value], src)
        if shape_and_dtype is None:
            return plain
        shape, dtype = shape_and_dtype
        sent = torch.empty(shape, dtype=getattr(torch, dtype), device=self.get_device())
        if self.get_rank() == src:
            sent.copy_(value)
        dist.broadcast(sent, group=self.process_group(), group_src=src)
        return sent

    def release_operators(self, *, captured: bool = False) -> None:
        """Close the operators that calls with operands alone have made, and those inside this host; collective.

        Args:
            captured: also those that a stream was captured of; its graphs must not be replayed after this.

        Raises:
            RuntimeError: some were captured, which is not expected: nothing is released.
            TimeoutError, PeerError: see `check`.
        """
        super().release_operators(captured=captured)
        self.local.release_operators(captured=captured)

    def _close(self, *, is_failing: bool) -> None:
        if not self.recovery.is_closed and self.control_plane.is_owned:
            self._is_leaving = is_failing or self.recovery.has_failed
            if self._is_leaving:
                self.control_plane.abort("it has left")  # which ends the groups, or waits for their end
        super()._close(is_failing=is_failing)

    # What needs one heap over all ranks ------------------------------------------------------------------------------

    def _of_a_host(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError: it is `local`'s."""
        raise RuntimeError(
            f"{self.topology.num_hosts} hosts have no heap in common; that of this host's ranks is ctx.local's"
        )

    _allocate = free = peer_view = is_symmetric = as_symmetric = grow = sleep = wake = _of_a_host
    get_heap_bases = get_watchdog = get_device_context = _of_a_host
    heap_bases = property(_of_a_host)
    ccl = property(_of_a_host)
    tracing = property(_of_a_host)
    collectives = property(_of_a_host)


def _within_host(rank_info: RankInfo, topology: Topology) -> RankInfo:
    """Return a rank's place among the ranks of its host."""
    place = topology.place_of(rank_info.rank)
    return replace(rank_info, rank=place, world_size=topology.ranks_per_host, group=None, hosts=(), store=None)


def _nccl_options(sms: int) -> dist.ProcessGroupNCCL.Options:
    """Return options of a group whose kernels take so many SMs at most, and come before others that wait."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = _CTAS_PER_SM * sms
    return options
