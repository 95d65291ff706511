"""Collectives of values in registers, by one program per rank: values go through a workspace, and come back.

Each rank stores its values to a slot of its own on every peer, signals, waits for all, and combines the slots in the
order of the ranks: one step between ranks, and the same bits on all of them. Calls take turns between two halves of
the workspace, so no "ready" is needed: who stores in call e + 2 has seen every peer's flag of call e + 1, and a peer
sets that after it has read what came in call e.

Workspace and flags are of one program per rank; a kernel with many gives each its own part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.rma import translate
from .access import accumulator
from .epochs import DONE, barrier_all, begin_call


@triton.jit
def all_reduce_value(value, op: tl.constexpr, ctx, workspace_ptr, flags_ptr, epoch=None):
    """Combine all ranks' values, element by element, and return the result.

    Sums are fp32 for floats of at most 32 bits, in the order of the ranks.
    Edge: what each rank's program did before its call happens before what any of these programs does after its call.

    Args:
        value: a block of one or two dimensions, of the same shape and dtype on all ranks.
        op: "sum", "max" or "min".
        ctx: a `DeviceContext`.
        workspace_ptr: memory on the heap of the values' dtype: 2 * world_size times as many elements as `value` has.
        flags_ptr: world_size + 1 int64 words on the heap, zeroed once.
        epoch: the number of this call with these flags, from 1 and growing by 1; None: calls are counted on the device,
            and a captured graph can be replayed.

    Returns:
        A block like `value`.
    """
    number = begin_call(flags_ptr, epoch, ctx)
    half_ptr = workspace_ptr + (number % 2) * ctx.world_size * value.numel
    offsets = _offsets(value.shape)
    for step in range(ctx.world_size):
        peer = (ctx.rank + step) % ctx.world_size
        slot_ptr = translate(half_ptr, ctx.rank, peer, ctx.heap_bases) + ctx.rank * value.numel
        tl.store(slot_ptr + offsets, value)
    barrier_all(flags_ptr, number, DONE, ctx)
    return _combine(half_ptr, offsets, value.numel, op, ctx).to(value.dtype)


@triton.jit
def reduce_scatter_value(value, op: tl.constexpr, axis: tl.constexpr, ctx, workspace_ptr, flags_ptr, epoch=None):
    """Combine all ranks' values, element by element, and return this rank's shard of the result.

    Order and edge: those of `all_reduce_value`.

    Args:
        value: a block of one or two dimensions, of the same shape and dtype on all ranks.
        op: "sum", "max" or "min".
        axis: the dimension that is cut, in the order of the ranks; world_size must divide it, and be a constant.
        ctx: a `DeviceContext`.
        workspace_ptr: memory on the heap of the values' dtype: twice as many elements as `value` has.
        flags_ptr, epoch: as of `all_reduce_value`.

    Returns:
        A block like `value`, shorter along `axis` by a factor of world_size.
    """
    if len(value.shape) == 1:
        part = _reduce_scatter(value[None, :], op, 1, ctx, workspace_ptr, flags_ptr, epoch)
        return tl.reshape(part, (part.numel,))
    else:
        return _reduce_scatter(value, op, axis, ctx, workspace_ptr, flags_ptr, epoch)


@triton.jit
def _reduce_scatter(value, op: tl.constexpr, axis: tl.constexpr, ctx, workspace_ptr, flags_ptr, epoch):
    """Run `reduce_scatter_value` for a block of two dimensions."""
    tl.static_assert(value.shape[axis] % ctx.world_size == 0, "world_size must divide the axis that is cut")
    rows: tl.constexpr = value.shape[0] // (ctx.world_size if axis == 0 else 1)
    columns: tl.constexpr = value.shape[1] // (ctx.world_size if axis == 1 else 1)
    size: tl.constexpr = rows * columns
    row, column = tl.arange(0, value.shape[0])[:, None], tl.arange(0, value.shape[1])[None, :]
    number = begin_call(flags_ptr, epoch, ctx)
    half_ptr = workspace_ptr + (number % 2) * value.numel
    for step in range(ctx.world_size):
        peer = (ctx.rank + step) % ctx.world_size
        slot_ptr = translate(half_ptr, ctx.rank, peer, ctx.heap_bases) + ctx.rank * size
        if axis == 0:
            offsets, mask = (row - peer * rows) * columns + column, row // rows == peer
        else:
            offsets, mask = row * columns + column - peer * columns, column // columns == peer
        tl.store(slot_ptr + offsets, value, mask=mask)
    barrier_all(flags_ptr, number, DONE, ctx)
    return _combine(half_ptr, _offsets((rows, columns)), size, op, ctx).to(value.dtype)


@triton.jit
def _offsets(shape: tl.constexpr):
    """Return the offsets of a contiguous block's elements."""
    if len(shape) == 1:
        return tl.arange(0, shape[0])
    else:
        tl.static_assert(len(shape) == 2, "a block of values has one or two dimensions")
        return tl.arange(0, shape[0])[:, None] * shape[1] + tl.arange(0, shape[1])[None, :]


@triton.jit
def _combine(half_ptr, offsets, size: tl.constexpr, op: tl.constexpr, ctx):
    """Combine the slots of all ranks in their order. .cg: L1 may hold what a slot held two calls earlier."""
    tl.static_assert(op == "sum" or op == "max" or op == "min", 'op is "sum", "max" or "min"')
    total = accumulator(tl.load(half_ptr + offsets, cache_modifier=".cg"))
    for peer in range(1, ctx.world_size):
        other = accumulator(tl.load(half_ptr + peer * size + offsets, cache_modifier=".cg"))
        if op == "sum":
            total += other
        elif op == "max":
            total = tl.maximum(total, other)
        else:
            total = tl.minimum(total, other)
    return total
