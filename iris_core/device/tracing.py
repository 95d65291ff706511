"""What a context object records of its kernel, as `ctx.tracing`: spans of `spans.py`, with names and arguments of Iris.

`Context.tracing` is the host's half.
"""

# Triton reads the annotations of an aggregate as classes: no `from __future__ import annotations` here.

import triton
import triton.language as tl

from .aggregate import aggregate
from .spans import begin_event, end_event

EVENTS = (
    "load", "store", "get", "put", "copy", "atomic_add", "atomic_sub", "atomic_cas", "atomic_xchg", "atomic_xor",
    "atomic_and", "atomic_or", "atomic_min", "atomic_max",
)  # fmt: skip


@aggregate
class TraceEvent:
    """Kinds of events that have a name, as numbers: ``TraceEvent().put``. Those from 14 on are the kernel's own."""

    __annotations__ = dict.fromkeys(EVENTS, tl.constexpr)

    @triton.constexpr_function
    def __init__(self):
        for number, name in enumerate(EVENTS):
            setattr(self, name, tl.constexpr(number))


@aggregate
class _Event:
    """An event that has begun."""

    kind: tl.constexpr
    begin: tl.core.base_value
    peer: tl.core.base_value
    num_bytes: tl.core.base_value
    tile: tl.core.base_value

    @triton.constexpr_function
    def __init__(self, kind, begin, peer, num_bytes, tile):
        self.kind = tl.constexpr(kind)
        self.begin = _as_value(begin)
        self.peer = _as_value(peer)
        self.num_bytes = _as_value(num_bytes)
        self.tile = _as_value(tile)


@aggregate
class Tracing:
    """Records events of the running program. It is no code where the context object was made without tracing."""

    trace_ptr: tl.core.base_value

    @triton.constexpr_function
    def __init__(self, trace_ptr):
        self.trace_ptr = _as_value(trace_ptr)

    @triton.jit
    def record_event_start(self, event_id: tl.constexpr, target_rank, address, pid_m, pid_n, mask=None):
        """Begin an event; return what `record_event_end` takes.

        Args:
            event_id: its kind, of `TraceEvent` or a number from 14 on, which ``ctx.tracing.enable(kinds=...)`` names.
            target_rank: the rank that it is with.
            address: pointers, whose number and dtype say how many bytes it is of.
            pid_m, pid_n: for which tile.
            mask: which of the pointers are used; None for all.
        """
        if self.trace_ptr is None:
            return _Event(event_id, 0, 0, 0, 0)
        else:
            num_bytes = _count(address, mask) * (address.dtype.scalar.element_ty.primitive_bitwidth // 8)
            tile = tl.cast(pid_m, tl.int64) * (1 << 32) + pid_n
            return _Event(event_id, begin_event(self.trace_ptr), target_rank, num_bytes, tile)

    @triton.jit
    def record_event_end(self, handle):
        """Record an event that `record_event_start` has begun, until now."""
        if self.trace_ptr is not None:
            end_event(self.trace_ptr, handle.kind, handle.begin, handle.peer, handle.num_bytes, handle.tile)


@triton.constexpr_function
def _as_value(number):
    """Return a tensor as it is, anything else as a constant."""
    return number if isinstance(number, tl.tensor) else tl.constexpr(number)


@triton.jit
def _count(address, mask):
    """Return how many lanes a mask selects, of a block of pointers."""
    if mask is None:
        return address.numel
    else:
        count = mask.to(tl.int32)
        for _ in tl.static_range(len(mask.shape)):
            count = tl.sum(count, axis=0)
        return count
