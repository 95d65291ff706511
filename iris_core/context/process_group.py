"""torch's process group of the ranks of a context, for what compares with the library's collectives."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..rendezvous.control_plane import ControlPlane
from .host import ProcessGroup

_ending: set[dist.ProcessGroup] = set()  # whose end was begun here, and has not come


def make_process_group(
    control_plane: ControlPlane,
    device: torch.device | None,
    given: dist.ProcessGroup | None = None,
    store: dist.Store | None = None,
    *,
    limit_s: float | None = None,
) -> ProcessGroup:
    """Return a process group of these ranks; collective.

    One that is made here waits as long as the ranks do on the host, where torch would wait for 10 or 30 minutes, and
    for its own end without limit: `ProcessGroup.leave` raises TimeoutError then.

    Args:
        control_plane: the ranks.
        device: the GPU of this rank, for NCCL or RCCL; None for gloo.
        given: the one that they are of, which may be of another backend.
        store: that ranks on several hosts share; None where all are on one.
        limit_s: how long one that is made here waits, if not as long as the ranks do on the host; 0 for torch's own.

    Raises:
        RuntimeError: torch's group of a rank is one that was made here and has not ended; on every rank. Or there is
            none, and the ranks are of several hosts.
        PeerError: a rank did not come.
    """
    backend = _backend(device)
    limit_s = control_plane.timeout_s if limit_s is None else limit_s
    known = given if given is not None else dist.group.WORLD
    with control_plane.collective_section("look for a process group"):
        if known in _ending:
            raise RuntimeError(
                "torch's process group of this process is one of a context that was closed, and has not ended: CUDA "
                "graphs hold its collectives; drop those before close(), or start the ranks again"
            )
    if known is not None:
        if _serves(known, backend, device or torch.device("cpu")):
            return ProcessGroup(known, lambda is_failing: None)
        ranks = dist.get_process_group_ranks(known)
        return new_group(ranks, device, limit_s, use_local_synchronization=given is not None)
    if store is None and not control_plane.passes_fds:
        raise RuntimeError("the ranks are of several hosts: initialise torch.distributed before there")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("torch", store) if store else _store_of_host(control_plane),
        rank=control_plane.rank,
        world_size=control_plane.world_size,
        device_id=device,
        **_limit(limit_s),
    )
    world = dist.group.WORLD
    assert world is not None
    return ProcessGroup(world, lambda is_failing: _destroy(world, device, limit_s, is_failing))


def new_group(ranks: Sequence[int], device: torch.device | None, limit_s: float, **options: Any) -> ProcessGroup:
    """Return a new group of some of torch's ranks, NCCL's or RCCL's on a GPU and else gloo's; collective.

    Args:
        ranks: of torch's default group.
        device: the GPU of this rank; None for gloo.
        limit_s: how long collectives, and its end, wait for a rank; 0 for torch's own limit.
        options: further arguments of ``torch.distributed.new_group``.
    """
    made = dist.new_group(ranks, backend=_backend(device), **_limit(limit_s), **options)
    return ProcessGroup(made, lambda is_failing: _destroy(made, device, limit_s, is_failing))


def _backend(device: torch.device | None) -> str:
    return "gloo" if device is None else "nccl"


def _limit(limit_s: float) -> dict[str, Any]:
    return {"timeout": timedelta(seconds=limit_s)} if limit_s else {}


def _store_of_host(control_plane: ControlPlane) -> dist.Store:
    own = None
    if control_plane.rank == 0:
        own = dist.TCPStore("127.0.0.1", 0, control_plane.world_size, is_master=True, wait_for_workers=False)
    port = control_plane.broadcast(own.port if own else 0, 0)
    return own or dist.TCPStore("127.0.0.1", port, control_plane.world_size, is_master=False)


def _serves(known: dist.ProcessGroup, backend: str, device: torch.device) -> bool:
    """Whether a group's collectives on a device are that backend's; a group may have one for each kind of device."""
    if dist.get_backend(known) == backend:
        return True
    try:
        return known._get_backend(device).name() == backend
    except RuntimeError:  # it has none for such a device
        return False


def _destroy(own: dist.ProcessGroup, device: torch.device | None, timeout_s: float, is_failing: bool) -> None:
    """End a group that was made here, unless its user has; NCCL waits for every graph that holds one of its calls."""
    if own not in dist.distributed_c10d._world.pg_map:  # its user has left, and perhaps come back
        return
    ended: Future[None] = Future()

    def destroy() -> None:
        try:
            with torch.cuda.device(device) if device is not None else contextlib.nullcontext():
                dist.destroy_process_group(own)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)
        _ending.discard(own)

    _ending.add(own)
    thread = threading.Thread(target=destroy, name="end of a process group", daemon=True)
    thread.start()
    thread.join(timeout_s or None)
    try:
        if thread.is_alive():
            raise TimeoutError(
                f"torch's process group of these ranks has not ended within {timeout_s:g} s, and NCCL waits for the "
                "CUDA graphs that hold its collectives: before close(), drop those graphs, and torch.compiler.reset() "
                'those of mode="reduce-overhead"'
            )
        ended.result()
    except Exception as error:
        if not is_failing:
            raise
        with contextlib.suppress(Warning):  # where these are errors, it would hide the one on its way
            warnings.warn(f"{type(error).__name__}: {error}", stacklevel=2)
