"""Which kind of memory, and of which GPU, a rank takes; and how many ranks take the same."""

from __future__ import annotations

from collections import Counter

import torch

from ..interpreter import patches as interpreter
from ..rendezvous import rank_info
from ..rendezvous.control_plane import ControlPlane
from . import make_backend
from .base import Backend


def choose_backend(device: str, origin: rank_info.RankInfo) -> Backend:
    """Return the backend for what a caller asks for, "cuda", "cpu" or "auto", on this rank.

    Raises:
        RuntimeError: the machine lacks what the device needs.
        ValueError: there is no such device.
    """
    if origin.node is not None:
        return origin.node.backend(origin.rank)
    return make_backend(*_choose(device, origin))


def ranks_on_one_device(control_plane: ControlPlane, backend: Backend, ranks_per_gpu: int) -> int:
    """Return how many ranks are on the device that has the most; collective.

    Args:
        control_plane: all ranks.
        backend: this rank's.
        ranks_per_gpu: how many this rank allows.

    Raises:
        ValueError: more than a rank allows.
    """
    said = control_plane.all_gather([backend.identity(), ranks_per_gpu])
    if not all(name for name, _ in said):  # what is asked of the context is compared later
        return 1
    ranks = Counter(name for name, _ in said)
    most, found = min(allowed for _, allowed in said), max(ranks.values())
    if found > most:
        raise ValueError(
            f"world size {control_plane.world_size} is larger than the number of GPUs the ranks see ({len(ranks)}); "
            f"start at most {most * len(ranks)} ranks, {rank_info.advice_to_share(found)}"
        )
    return found


def _choose(device: str, origin: rank_info.RankInfo) -> tuple[str, int]:
    device = rank_info.asked_device(device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and not interpreter.is_enabled() else "cpu"
    if device == "cpu":
        interpreter.enable()
        return "shm", 0
    if interpreter.is_enabled():
        variable = "TRITON_INTERPRET is set (launch sets it for ranks on the CPU)"
        why = variable if interpreter.was_asked_for() else "it has had a context on the CPU"
        raise RuntimeError(
            f"device='cuda', but kernels of this process are interpreted, as {why}, and cannot reach a GPU's memory; "
            "use another process for the GPU"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("device='cuda', but torch sees no GPU here; device='cpu' runs without one")
    return ("hip" if torch.version.hip else "cuda"), origin.local_rank % count
