"""Context objects for kernels: the device API without the arguments that are the same in every call.

`DeviceContext` is for kernels in Triton, `IrisDeviceCtx` for kernels in Gluon; names and arguments are those of the
Iris documentation.
"""

# Triton reads the annotations of an aggregate as classes: no `from __future__ import annotations` here.

import torch
import triton
import triton.language as tl

from .aggregate import aggregate
from .operations import Operations
from .tiles import TileOperations
from .tracing import Tracing

# Layout of a context tensor (int64 words on the device), which `Context.get_device_context` returns.
_RANK = tl.constexpr(0)
_WORLD_SIZE = tl.constexpr(1)
_HEAP_BASES = tl.constexpr(2)  # world_size of them; behind these the addresses of the watchdog's words and a trace's


def encode(rank: int, heap_bases: torch.Tensor, watchdog_address: int, trace_address: int = 0) -> torch.Tensor:
    """Return a context tensor, on the device of the heap bases; `set_trace` gives it another trace."""
    words = torch.empty(len(heap_bases) + 4, dtype=torch.int64, device=heap_bases.device)
    words[_RANK.value] = rank
    words[_WORLD_SIZE.value] = len(heap_bases)
    words[_HEAP_BASES.value : -2] = heap_bases.view(torch.int64)
    words[-2] = watchdog_address
    words[-1] = trace_address
    return words


def set_trace(context_tensor: torch.Tensor, trace: torch.Tensor) -> None:
    """Let kernels that take the context tensor record in this trace."""
    context_tensor[-1] = trace.data_ptr()


@triton.jit
def _watchdog_in(context_tensor, world_size):
    """Return what `wait` takes as `watchdog_ptr`."""
    return tl.load(context_tensor + _HEAP_BASES + world_size).to(tl.pointer_type(tl.int64))


@triton.jit
def _trace_in(context_tensor, world_size):
    """Return what `begin_event` takes as `trace_ptr`."""
    return tl.load(context_tensor + _HEAP_BASES + world_size + 1).to(tl.pointer_type(tl.int64))


@aggregate
class DeviceContext(TileOperations):
    """A rank's handle on the heap and its peers in a kernel in Triton. Make it with `initialize`.

    A pointer is given as it is on the rank that runs the kernel, for memory on the symmetric heap.

    Attributes:
        rank, world_size: as they were given, at run time or as constants; or read from the context tensor.
        heap_bases, watchdog_ptr: what the loose functions take by these names.
        tracing: records events, see `Tracing`.
    """

    rank: tl.core.base_value
    world_size: tl.core.base_value
    heap_bases: tl.tensor
    watchdog_ptr: tl.tensor
    tracing: Tracing

    @triton.constexpr_function
    def __init__(self, rank, world_size, heap_bases, watchdog_ptr, trace_ptr=None):
        self.rank = rank if isinstance(rank, tl.tensor) else tl.constexpr(rank)
        self.world_size = world_size if isinstance(world_size, tl.tensor) else tl.constexpr(world_size)
        self.heap_bases = heap_bases
        self.watchdog_ptr = watchdog_ptr
        self.tracing = Tracing(trace_ptr)

    @staticmethod
    @triton.jit
    def initialize(context_tensor, rank=None, world_size=None, tracing: tl.constexpr = False):
        """Return the object.

        Args:
            context_tensor: ``Context.get_device_context()``, int64 words on the device.
            rank, world_size: this rank and the number of ranks, at run time or as constants; None for those in the
                context tensor, read at run time.
            tracing: whether `ctx.tracing` records, once ``Context.tracing`` is enabled; without it, it is no code.
        """
        if rank is None:
            rank = tl.load(context_tensor + _RANK).to(tl.int32)
        if world_size is None:
            world_size = tl.load(context_tensor + _WORLD_SIZE).to(tl.int32)
        watchdog_ptr = _watchdog_in(context_tensor, world_size)
        trace_ptr = None
        if tracing:
            trace_ptr = _trace_in(context_tensor, world_size)
        return DeviceContext(rank, world_size, context_tensor + _HEAP_BASES, watchdog_ptr, trace_ptr)


@aggregate
class IrisDeviceCtx(Operations):
    """A rank's handle on the heap and its peers in a kernel in Gluon. Make it with `initialize`.

    A kernel takes the class as a ``gl.constexpr``, or names it.

    Attributes:
        rank, world_size: read from the context tensor; `cur_rank` and `num_ranks` are the same.
        heap_bases, watchdog_ptr: what the loose functions take by these names.
        tracing: records events, see `Tracing`.
    """

    rank: tl.tensor
    world_size: tl.tensor
    cur_rank: tl.tensor
    num_ranks: tl.tensor
    heap_bases: tl.tensor
    watchdog_ptr: tl.tensor
    tracing: Tracing

    @triton.constexpr_function
    def __init__(self, rank, world_size, heap_bases, watchdog_ptr, trace_ptr=None):
        self.rank = rank
        self.world_size = world_size
        self.cur_rank = rank
        self.num_ranks = world_size
        self.heap_bases = heap_bases
        self.watchdog_ptr = watchdog_ptr
        self.tracing = Tracing(trace_ptr)

    @staticmethod
    @triton.jit
    def initialize(context_tensor, tracing: tl.constexpr = False):
        """Return the object.

        Args:
            context_tensor, tracing: as of `DeviceContext.initialize`.
        """
        rank = tl.load(context_tensor + _RANK).to(tl.int32)
        world_size = tl.load(context_tensor + _WORLD_SIZE).to(tl.int32)
        watchdog_ptr = _watchdog_in(context_tensor, world_size)
        trace_ptr = None
        if tracing:
            trace_ptr = _trace_in(context_tensor, world_size)
        return IrisDeviceCtx(rank, world_size, context_tensor + _HEAP_BASES, watchdog_ptr, trace_ptr)
