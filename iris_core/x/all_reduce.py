"""All-reduce of a tile, by one program per rank: five algorithms.

| algorithm | traffic of a tile, a rank | steps between ranks | sum |
|---|---|---|---|
| one_shot | loads W - 1 tiles | 2 | fp32, in the order of the ranks |
| two_shot | 2 (W - 1) / W tiles on average | 2 | fp32, in the order of the ranks |
| ring | 2 (W - 1) / W tiles on average, to its neighbour only | 2 (W - 1) | in ring order, rounded at each rank |
| atomic | adds W - 1 tiles | 2 | in any order, rounded at each addition |
| spinlock | loads and stores W - 1 tiles | 2, and as long as locks are taken | in any order, rounded at each addition |

W is the world size. "fp32" is for floats of at most 32 bits; wider floats and integers are summed as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.rma import translate
from ..device.sync import signal, wait
from .access import accumulator, load_tile, on_rank, store_tile, store_to_all, sum_tiles
from .epochs import (
    DONE,
    LATER,
    READY,
    barrier_all,
    begin_call,
    done_by,
    flags_of,
    ready_for,
    signal_one,
    wait_one,
)


@triton.jit
def all_reduce_one_shot(tile, src_view, dst_view, ctx, flags_ptr=None, epoch=None):
    """Sum all ranks' tiles: each rank loads all of them and stores the sum to its own output.

    Sums are fp32 for floats of at most 32 bits, in the order of the ranks: the same bits on every rank.
    Edge: what each rank's program did before its call, as storing its tile, happens before the loads; the loads happen
    before what any of these programs does after its call, as storing its next tile.

    Args:
        tile: a `TileView`.
        src_view: the ranks' summands, on the heap.
        dst_view: the output, in memory of this rank; not `src_view`.
        ctx: a `DeviceContext`.
        flags_ptr: int64 words on the heap, (number of tiles of `src_view`, world_size + 1), zeroed once. None: nothing
            is ordered, the caller has barriers before and after.
        epoch: the number of this call with these flags, from 1 and the same on all ranks; None: calls are counted on
            the device, and a captured graph can be replayed.
    """
    flags = flags_of(flags_ptr, src_view.tile_id(tile), ctx)
    number = begin_call(flags, epoch, ctx)
    barrier_all(flags, number, READY, ctx)
    store_tile(dst_view, tile, sum_tiles(src_view, tile, ctx))
    barrier_all(flags, number, DONE, ctx)


@triton.jit
def all_reduce_two_shot(tile, src_view, dst_view, ctx, flags_ptr=None, epoch=None):
    """Sum all ranks' tiles: one rank, the owner of this tile, loads all of them and stores the sum to all outputs.

    Tiles go to the ranks in turn. Sums as of `all_reduce_one_shot`.
    Edge: what each rank's program did before its call happens before the owner's loads and stores; these happen before
    what any of these programs does after its call.

    Args:
        tile, src_view, ctx, flags_ptr, epoch: as of `all_reduce_one_shot`.
        dst_view: the output, on the heap; not `src_view`.
    """
    tile_id = src_view.tile_id(tile)
    owner = tile_id % ctx.world_size
    flags = flags_of(flags_ptr, tile_id, ctx)
    number = begin_call(flags, epoch, ctx)
    ready_for(owner, flags, number, ctx)
    if ctx.rank == owner:
        store_to_all(dst_view, tile, sum_tiles(src_view, tile, ctx), ctx)
    done_by(owner, flags, number, ctx)


@triton.jit
def all_reduce_ring(tile, src_view, dst_view, ctx, flags_ptr, epoch=None):
    """Sum all ranks' tiles along the ring of the ranks, and pass the sum round once more.

    Ranks add in the order of the ring, from a rank that depends on the tile. Each adds in fp32 and rounds to the
    output's dtype: only with an output of fp32 is that a sum in fp32. The bits are the same on every rank and in every
    run. The algorithm needs its flags.
    Edge: this rank's output is written after what its program did before the call; on return it is complete.

    Args:
        tile, ctx, flags_ptr, epoch: as of `all_reduce_one_shot`, but that flags there must be.
        src_view: this rank's summand, in any memory of this rank.
        dst_view: the output, on the heap; not `src_view`. Sums travel in it.
    """
    tile_id = src_view.tile_id(tile)
    flags = flags_of(flags_ptr, tile_id, ctx)
    number = begin_call(flags, epoch, ctx)
    last = ctx.world_size - 1
    place = (ctx.rank + tile_id) % ctx.world_size  # in the order of addition
    next_rank = (ctx.rank + 1) % ctx.world_size
    previous = (ctx.rank + last) % ctx.world_size
    next_view = on_rank(dst_view, next_rank, ctx)
    signal_one(flags, number, READY, previous, ctx)
    total = accumulator(load_tile(src_view, tile))
    if place > 0:
        wait_one(flags, number, DONE, previous, ctx)
        total += load_tile(dst_view, tile).to(total.dtype)
    wait_one(flags, number, READY, next_rank, ctx)
    if place < last:
        store_tile(next_view, tile, total)
        signal_one(flags, number, DONE, next_rank, ctx)
        wait_one(flags, number, LATER, previous, ctx)
        if place < last - 1:
            store_tile(next_view, tile, load_tile(dst_view, tile))
            signal_one(flags, number, LATER, next_rank, ctx)
    else:
        store_tile(dst_view, tile, total)
        if last > 0:
            store_tile(next_view, tile, total)
            signal_one(flags, number, LATER, next_rank, ctx)


@triton.jit
def all_reduce_atomic(tile, src_view, dst_view, ctx, flags_ptr=None, epoch=None):
    """Add this rank's tile to all outputs by atomics; outputs must be zero before, or hold what is to be added to.

    The order of additions differs from run to run and from rank to rank, and each is rounded to the output's dtype:
    ranks may end with different bits.
    Edge: what each rank's program did before its call, as zeroing its output, happens before the additions to it;
    these happen before what any of these programs does after its call.

    Args:
        tile, ctx, flags_ptr, epoch: as of `all_reduce_one_shot`.
        src_view: this rank's summand, in any memory of this rank.
        dst_view: the output, on the heap, of a dtype that has atomic addition.
    """
    flags = flags_of(flags_ptr, src_view.tile_id(tile), ctx)
    number = begin_call(flags, epoch, ctx)
    value = load_tile(src_view, tile).to(dst_view.ptr.dtype.element_ty)
    barrier_all(flags, number, READY, ctx)
    for step in range(ctx.world_size):
        pointers, mask = on_rank(dst_view, (ctx.rank + step) % ctx.world_size, ctx).tile_ptr(tile)
        # Relaxed: it is the barrier that publishes the sum.
        tl.atomic_add(pointers, value, mask=mask, sem="relaxed", scope="sys")
    barrier_all(flags, number, DONE, ctx)


@triton.jit
def all_reduce_spinlock(tile, src_view, dst_view, locks_ptr, ctx, flags_ptr=None, epoch=None):
    """Add this rank's tile to all outputs, each under a lock; outputs must be zero before, as of `all_reduce_atomic`.

    Order and rounding are those of `all_reduce_atomic`, for any dtype. A lock is a pair of counters, tickets given and
    tickets done, and serves in the order of tickets; waits for it are bounded.
    Edge: that of `all_reduce_atomic`. What was done under a lock happens before what is done under it next.

    Args:
        tile, ctx, flags_ptr, epoch: as of `all_reduce_one_shot`.
        src_view: this rank's summand, in any memory of this rank.
        dst_view: the output, on the heap.
        locks_ptr: int64 words on the heap, (number of tiles, 2), zeroed once.
    """
    tile_id = src_view.tile_id(tile)
    flags = flags_of(flags_ptr, tile_id, ctx)
    number = begin_call(flags, epoch, ctx)
    value = accumulator(load_tile(src_view, tile))
    barrier_all(flags, number, READY, ctx)
    for step in range(ctx.world_size):
        peer = (ctx.rank + step) % ctx.world_size
        given_ptr = translate(locks_ptr, ctx.rank, peer, ctx.heap_bases) + 2 * tl.cast(tile_id, tl.int64)
        # Relaxed: it is the wait that acquires.
        ticket = tl.atomic_add(given_ptr, 1, sem="relaxed", scope="sys")
        wait(given_ptr + 1, ticket, ctx.watchdog_ptr, scope="sys")
        view = on_rank(dst_view, peer, ctx)
        store_tile(view, tile, load_tile(view, tile).to(value.dtype) + value)
        signal(given_ptr + 1, ticket + 1, scope="sys")
    barrier_all(flags, number, DONE, ctx)
