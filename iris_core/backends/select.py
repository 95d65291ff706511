"""Which kind of memory, and of which GPU, a rank takes; and how many ranks take the same."""

from __future__ import annotations

from collections import Counter

import torch

from ..device import interpretation
from ..rendezvous.control_plane import ControlPlane
from ..utils.settings import advice_to_share, asked_device
from .base import Backend


def select_backend(device: str, local_rank: int) -> Backend:
    """Return the backend for what a caller asks for, "cuda", "cpu" or "auto", on this rank.

    Raises:
        RuntimeError: the machine lacks what the device needs.
        ValueError: there is no such device.
    """
    device = asked_device(device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and not interpretation.is_enabled() else "cpu"
    if device == "cpu":
        interpretation.enable()
        from .shm import ShmBackend

        return ShmBackend()
    if interpretation.is_enabled():
        variable = "TRITON_INTERPRET is set (launch sets it for ranks on the CPU)"
        why = "it has had a context on the CPU" if interpretation.is_enabled_here() else variable
        raise RuntimeError(
            f"device='cuda', but kernels of this process are interpreted, as {why}, and cannot reach a GPU's memory; "
            "use another process for the GPU"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("device='cuda', but torch sees no GPU here; device='cpu' runs without one")
    if torch.version.hip:
        from .hip import HipBackend

        return HipBackend(local_rank % count)
    from .cuda import CudaBackend

    return CudaBackend(local_rank % count)


def ranks_on_one_device(control_plane: ControlPlane, backend: Backend, ranks_per_gpu: int) -> int:
    """Return how many ranks are on the device that has the most; collective.

    Args:
        control_plane: all ranks.
        backend: this rank's.
        ranks_per_gpu: how many this rank allows.

    Raises:
        ValueError: more than a rank allows.
    """
    devices = control_plane.all_gather([backend.identity(), ranks_per_gpu])
    if not all(name for name, _ in devices):  # what is asked of the context is compared later
        return 1
    ranks = Counter(name for name, _ in devices)
    most, found = min(allowed for _, allowed in devices), max(ranks.values())
    if found > most:
        raise ValueError(
            f"world size {control_plane.world_size} is larger than the number of GPUs the ranks see ({len(ranks)}); "
            f"start at most {most * len(ranks)} ranks, {advice_to_share(found)}"
        )
    return found
