"""Rank info: which rank this process is, and the address of the ranks, as what started the process says."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..errors import PeerError, ranks_named
from ..utils.owner import Owner
from ..utils.settings import number_in
from . import unix_socket
from .unix_socket import random_address

_MPI_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


@dataclass(frozen=True)
class RankInfo:
    """A process's place among the ranks.

    Args:
        rank, world_size: its rank and the number of ranks.
        local_rank: the number of the GPU it should take.
        address: the name of the socket of the first rank on this host; "tcp://…" of rank 0 where the ranks of several
            hosts are to have one heap.
        group: torch's process group of these ranks, where the caller gave one.
        hosts: that the ranks live on, by rank; empty where all are on this one.
        store: through which the ranks of several hosts exchange values; None where all are on this one.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    group: dist.ProcessGroup | None = None
    hosts: tuple[str, ...] = ()
    store: dist.Store | None = None


HOST_VARIABLE = "IRIS_HOST_ID"
TORCHRUN_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_launched: tuple[RankInfo, Owner] | None = None


def set_launched(rank_info: RankInfo) -> None:
    """Say that `iris_core.launch` started this process as `rank_info`."""
    global _launched
    _launched = rank_info, Owner()


def rank_of_torchrun() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, as torchrun's variables say; None where they are not set.

    Raises:
        ValueError: one makes no sense.
    """
    if not os.environ.keys() >= TORCHRUN_VARIABLES:
        return None
    world_size = number_in("WORLD_SIZE", 1)
    number_in("MASTER_PORT", 0, 65535)
    _local_rank(0)
    return number_in("RANK", 0, world_size - 1), world_size


def _local_rank(default: int) -> int:
    return number_in("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else default


def find_rank_info(group: dist.ProcessGroup | None = None) -> RankInfo:
    """Return this process's place: in `group`, or from `launch`, torch.distributed, torchrun, mpirun, or alone.

    Raises:
        ImportError: started by mpirun, and mpi4py is not installed.
        ValueError: this process is not in `group`, or what torchrun sets makes no sense.
        RuntimeError: mpirun has started ranks on several hosts, or this process was forked from a rank of `launch`.
        PeerError: a rank did not come, or rank 0 has gone with torch's store.
    """
    if group is not None:
        return replace(_from_group(group), group=group)
    if _launched is not None:
        rank_info, owner = _launched
        owner.check("is a rank that iris_core.launch started")
        return rank_info
    if dist.is_available() and dist.is_initialized():
        return _from_group(dist.group.WORLD)
    if rank_of_torchrun() is not None:
        store, rank, world_size = next(iter(dist.rendezvous("env://")))
        return _from_store(store, rank, world_size, "torchrun", "all", rank)
    if any(name in os.environ for name in _MPI_SIZE_VARIABLES):
        return _from_mpi()
    if multiprocessing.parent_process() is not None:
        warnings.warn(
            "nothing says which rank this process is, which another has started: its context is a world of one rank; "
            "with torch.multiprocessing.spawn, call torch.distributed.init_process_group first",
            stacklevel=2,
        )
    return RankInfo(0, 1, 0, random_address())


_stores: list[dist.Store] = []  # a store closes with its last reference, and torchrun's must outlive a context
_contexts_made: Counter[str] = Counter()  # by what their ranks are


def _from_group(group: dist.ProcessGroup | None) -> RankInfo:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is none of the given group's; each process gives the group that it is in")
    ranks = dist.get_process_group_ranks(group)
    store = dist.distributed_c10d._get_default_store()
    return _from_store(store, rank, len(ranks), "torch.distributed", f"ranks {ranks}", dist.get_rank())


def _from_store(store: dist.Store, rank: int, world_size: int, started_by: str, whose: str, number: int) -> RankInfo:
    """Tell each other hosts and addresses through a store; `whose` identifies the group.

    `number` is the process's on its host.
    """
    local_rank = _local_rank(number)
    # A process that makes a second context later needs a second name.
    of_context = dist.PrefixStore(f"iris_core/{whose}/{_contexts_made[whose]}", store)
    _contexts_made[whose] += 1
    _stores.append(store)
    keys = [f"address/{one}" for one in range(world_size)]
    of_context.set(keys[rank], json.dumps([host_name(), _own_address(rank)]))
    try:
        of_context.wait(keys, timedelta(seconds=unix_socket.CONNECT_TIMEOUT_S))
    except RuntimeError as error:  # of torch's, of which one is that the time is over
        late = f"no address was put into {started_by}'s store within {unix_socket.CONNECT_TIMEOUT_S:.0f} s"
        raise PeerError(f"{_missing(of_context, keys)}: {late}: {error}") from None
    hosts, addresses = zip(*(json.loads(of_context.get(key)) for key in keys), strict=True)
    if addresses[0].startswith("tcp://"):
        return RankInfo(rank, world_size, local_rank, addresses[0])
    info = RankInfo(rank, world_size, local_rank, addresses[hosts.index(hosts[rank])])
    return info if len(set(hosts)) == 1 else replace(info, hosts=hosts, store=of_context)


def _missing(store: dist.Store, keys: list[str]) -> str:
    with contextlib.suppress(RuntimeError):  # the store is gone with rank 0
        return ranks_named(rank for rank, key in enumerate(keys) if not store.check([key]))
    return "rank 0"


def _from_mpi() -> RankInfo:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError("started by mpirun, but mpi4py is not installed: pip install 'iris-overlap[mpi]'") from error
    world = MPI.COMM_WORLD
    hosts, addresses = zip(*world.allgather((host_name(), _own_address(world.rank))), strict=True)
    if not addresses[0].startswith("tcp://") and len(set(hosts)) > 1:
        raise RuntimeError(
            "mpirun has started ranks on several hosts, which exchange values through a store of torch's: call "
            "torch.distributed.init_process_group before iris_core.iris; or, on hosts of one NVLink domain, set "
            "IRIS_TOKEN, on all ranks alike"
        )
    local_rank = world.Split_type(MPI.COMM_TYPE_SHARED).rank
    return RankInfo(world.rank, world.size, local_rank, addresses[0])


def host_name() -> str:
    """Return what identifies a host and its network namespace: abstract sockets reach no further.

    ``IRIS_HOST_ID``, any text, cuts a machine into several hosts.
    """
    simulated = os.environ.get(HOST_VARIABLE, "")
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {simulated}"
    return simulated


def _own_address(rank: int) -> str:
    """Return a new address of this rank; where ``IRIS_TOKEN`` is set, one of rank 0 that other hosts reach."""
    if rank or "IRIS_TOKEN" not in os.environ:
        return random_address()
    from .tcp_socket import listen  # which is no part of the core

    return listen()
