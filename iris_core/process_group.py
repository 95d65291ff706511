"""torch's process group of the ranks of a context, for what compares with the vendor's collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .host_group import HostGroup


def make_process_group(
    group: HostGroup, device: torch.device | None, given: dist.ProcessGroup | None = None
) -> tuple[dist.ProcessGroup, Callable[[], None]]:
    """Return a process group of these ranks, and what gives it back, if it was made here; collective.

    One that is made here waits as long as the ranks do on the host, where torch would wait for 10 or 30 minutes.

    Args:
        group: the ranks.
        device: the GPU of this rank, for NCCL or RCCL; None for gloo.
        given: the one that they are of, which may be of another backend.
    """
    backend = "gloo" if device is None else "nccl"
    limit: dict[str, Any] = {"timeout": timedelta(seconds=group.timeout_s)} if group.timeout_s else {}
    known = given if given is not None else dist.group.WORLD
    if known is not None:
        if _serves(known, backend, device or torch.device("cpu")):
            return known, lambda: None
        ranks = dist.get_process_group_ranks(known)
        made = dist.new_group(ranks, backend=backend, use_local_synchronization=given is not None, **limit)
        return made, lambda: _destroy(made)
    store = None
    if group.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, group.world_size, is_master=True, wait_for_workers=False)
    port = group.broadcast(store.port if store else 0, 0)
    store = store or dist.TCPStore("127.0.0.1", port, group.world_size, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=group.rank, world_size=group.world_size, device_id=device, **limit
    )
    world = dist.group.WORLD
    assert world is not None
    return world, lambda: _destroy(world)


def _serves(known: dist.ProcessGroup, backend: str, device: torch.device) -> bool:
    """Whether a group's collectives on a device are that backend's; a group may have one for each kind of device."""
    if dist.get_backend(known) == backend:
        return True
    try:
        return known._get_backend(device).name() == backend
    except RuntimeError:  # it has none for such a device
        return False


def _destroy(own: dist.ProcessGroup) -> None:
    if own in dist.distributed_c10d._world.pg_map:  # else its user has left, and perhaps come back
        dist.destroy_process_group(own)
