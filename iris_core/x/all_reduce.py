"""All-reduce of a tile, by one program a rank."""

from __future__ import annotations

import triton

from .access import store_tile, sum_tiles
from .epochs import DONE, READY, barrier_all, begin_call, flags_of


@triton.jit
def all_reduce_one_shot(tile, src_view, dst_view, ctx, flags_ptr=None, epoch=None):
    """Sum all ranks' tiles: each rank loads all of them and stores the sum to its own output.

    Sums are fp32 for floats of at most 32 bits, in the order of the ranks: the same bits on every rank.
    Edge: what each rank's program did before its call, as storing its tile, happens before the loads; the loads happen
    before what any of these programs does after its call, as storing its next tile.

    Args:
        tile: a `TileView`.
        src_view: the ranks' summands, on the heap.
        dst_view: the output, of this rank's memory; not `src_view`.
        ctx: a `RankContext`.
        flags_ptr: int64 words on the heap, (number of tiles of `src_view`, world_size + 1), zeroed once. None: nothing
            is ordered, the caller has barriers before and after.
        epoch: the number of this call with these flags, from 1; None: it is counted on the device, and a captured
            graph can be replayed.
    """
    flags = flags_of(flags_ptr, src_view.tile_id(tile), ctx)
    number = begin_call(flags, epoch, ctx)
    barrier_all(flags, number, READY, ctx)
    store_tile(dst_view, tile, sum_tiles(src_view, tile, ctx))
    barrier_all(flags, number, DONE, ctx)
