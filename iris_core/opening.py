"""Opening a context: what a process, or a rank of a simulated host, may have one of."""

from __future__ import annotations

import torch.distributed as dist

from .context import Context
from .rendezvous import rank_info
from .utils.settings import is_whole

DEFAULT_HEAP_SIZE = 1 << 30

_of_process: dict[int, Context] = {}  # this process's context, by rank; a simulated host keeps its ranks' own


def iris(
    heap_size: int = DEFAULT_HEAP_SIZE,
    device: str = "auto",
    *,
    timeout_s: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Context:
    """Make this process's context; collective over all ranks.

    The ranks are those of `group`, or of whatever started the process: `iris_core.launch`, an initialised
    ``torch.distributed``, ``torchrun``, ``mpirun``; alone, a world of one.

    Args:
        heap_size: bytes of symmetric heap a rank.
        device: "cuda" (NVIDIA or AMD GPUs), "cpu" (shared memory, kernels interpreted), or "auto": the GPUs if there
            are any and Triton is not told to interpret.
        timeout_s: limit of a wait in a kernel, in seconds; ranks wait for each other on the host twice as long. 0 for
            none; None for ``IRIS_TIMEOUT_S``, or 30.
        group: a process group of torch's, of ranks of one host, such as those of a replica of the model,
            ``mesh["tp"].get_group()``; each process gives the one that it is in. None for all ranks.

    Returns:
        The context. `Context.close` ends it; a process has one at a time.

    Raises:
        RuntimeError: this process has a context already, the machine lacks what the device needs, or the ranks are of
            several hosts; or this process was forked from a rank.
        ValueError: the device, the heap size or the limit makes no sense or is not the same on all ranks, there are
            more ranks than GPUs, or this process is not in `group`.
        PeerError: a rank did not start.
    """
    node = rank_info.simulated_host()
    for context in _of_process.values():
        context.group.check_owner()
    if _of_process if node is None else node.rank in node.contexts:
        raise RuntimeError("this process has a context already; close() it before making another")
    rank_info.asked_device(device)
    if not is_whole(heap_size):
        raise ValueError(f"heap_size is {heap_size!r}; it takes a positive number of bytes")
    if node is not None:  # nothing waits by the clock there: the host sees when nobody can go on
        return Context(heap_size, device, 0.0, group, node.contexts)
    return Context(heap_size, device, rank_info.timeout_s(timeout_s), group, _of_process)
