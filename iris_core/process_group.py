"""torch's process group of the ranks of a context, for what compares with the vendor's collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .host_group import HostGroup


def make_process_group(
    group: HostGroup, device: torch.device | None, given: dist.ProcessGroup | None = None
) -> tuple[dist.ProcessGroup, bool]:
    """Return a process group of these ranks, and whether torch.distributed was initialised for it; collective.

    One that is made here waits as long as the ranks do on the host, where torch would wait for 10 or 30 minutes.

    Args:
        group: the ranks.
        device: the GPU of this rank, for NCCL or RCCL; None for gloo.
        given: the one that they are of, which may be of another backend.
    """
    backend = "gloo" if device is None else "nccl"
    limit: dict[str, Any] = {"timeout": timedelta(seconds=group.timeout_s)} if group.timeout_s else {}
    if given is not None:
        if dist.get_backend(given) == backend:
            return given, False
        ranks = dist.get_process_group_ranks(given)
        return dist.new_group(ranks, backend=backend, use_local_synchronization=True, **limit), False
    if dist.is_initialized():
        world = dist.group.WORLD
        assert world is not None
        return (world if dist.get_backend() == backend else dist.new_group(backend=backend, **limit)), False
    store = None
    if group.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, group.world_size, is_master=True, wait_for_workers=False)
    port = group.broadcast(store.port if store else 0, 0)
    store = store or dist.TCPStore("127.0.0.1", port, group.world_size, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=group.rank, world_size=group.world_size, device_id=device, **limit
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD, True
