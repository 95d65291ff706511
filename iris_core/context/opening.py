"""How a process opens its context."""

from __future__ import annotations

import os

import torch.distributed as dist

from ..heap.heap import MemoryProvider
from ..utils import settings
from ..utils.settings import is_whole
from .context import Context
from .host import current_host
from .options import ContextOptions

DEFAULT_HEAP_SIZE = 1 << 30


def iris(
    heap_size: int = DEFAULT_HEAP_SIZE,
    device: str = "auto",
    *,
    timeout_s: float | None = None,
    group: dist.ProcessGroup | None = None,
    reserve_sms: int = 0,
    provider: str | MemoryProvider | None = None,
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
        group: a process group of torch's, such as of the ranks of a replica of the model, ``mesh["tp"].get_group()``;
            each process gives the one that it is in. None for all ranks.
        reserve_sms: SMs (compute units) of each GPU that kernels whose programs wait for each other leave free, such as
            for NCCL's on another stream; the same on all ranks. `Context.get_cu_count` and configurations' `num_sms`
            are without them.
        provider: of the heap's memory, instead of the driver: "torch_symmetric_memory", "nvshmem", or an object that is
            a `MemoryProvider`, of the same kind on all ranks. None for ``IRIS_PROVIDER``, which has one of the names,
            or the driver.

    Returns:
        The context; where the ranks live on several hosts, a `HierarchicalContext` (`iris_core.context.hierarchical`),
        unless ``IRIS_TOKEN`` is set: then they are of one NVLink domain and have one heap. `Context.close` ends it. A
        process has one at a time, or several of given groups, such as of a model and of a draft model on fewer ranks:
        ranks that are in two of them call these in the same order.

    Raises:
        RuntimeError: this process has a context already, and `group` is None; the machine lacks what the device needs;
            or this process was forked from a rank.
        ValueError: the device, the heap size, the limit or the reservation makes no sense or is not the same on all
            ranks, there are more ranks than GPUs, hosts have different numbers of ranks, or this process is not in
            `group`.
        PeerError: a rank did not start.
    """
    host = current_host()
    host.check_vacant(group)
    settings.asked_device(device)
    if not is_whole(heap_size):
        raise ValueError(f"heap_size is {heap_size!r}; it takes a positive number of bytes")
    provider = os.environ.get("IRIS_PROVIDER") or None if provider is None else provider
    rank_info = host.rank_info(group)
    limit_s, debug_mode = host.timeout_s(timeout_s), settings.switch_in("IRIS_DEBUG")
    options = ContextOptions(heap_size, device, limit_s, reserve_sms, provider, debug_mode)
    if not rank_info.hosts:
        return Context(host, rank_info, options)
    from .hierarchical.context import HierarchicalContext  # which is no part of the core

    return HierarchicalContext(host, rank_info, options)
