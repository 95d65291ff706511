"""Reductions of a tile whose sum goes to one rank."""

from __future__ import annotations

import triton
import triton.language as tl

from .access import store_tile, sum_tiles
from .epochs import begin_call, done_by, flags_of, ready_for


@triton.jit
def reduce(tile, src_view, dst_view, root, ctx, flags_ptr=None, epoch=None):
    """Sum all ranks' tiles on one rank, which loads all of them and stores the sum to its own output.

    Sums as of `all_reduce_one_shot`.
    Edge: what each rank's program did before its call happens before the loads; these happen before what any of these
    programs does after its call.

    Args:
        tile, src_view, ctx, flags_ptr, epoch: as of `all_reduce_one_shot`.
        dst_view: the output, in memory of `root`; not `src_view`. Others' is not written.
        root: the rank that gets the sum.
    """
    flags = flags_of(flags_ptr, src_view.tile_id(tile), ctx)
    number = begin_call(flags, epoch, ctx)
    ready_for(root, flags, number, ctx)
    if ctx.rank == root:
        store_tile(dst_view, tile, sum_tiles(src_view, tile, ctx))
    done_by(root, flags, number, ctx)


@triton.jit
def reduce_scatter(tile, src_view, dst_view, ctx, flags_ptr=None, epoch=None):
    """Sum all ranks' tiles on the rank that owns this one, which stores the sum to the same place of its output.

    With T tiles, rank r owns the T // world_size tiles from r * (T // world_size) on, the last rank the rest, too: of
    an output only the own tiles are written.

    Args:
        tile, src_view, dst_view, ctx, flags_ptr, epoch: as of `reduce`. Sums and edge, too.
    """
    share = src_view.number_of_tiles(tile.block_m, tile.block_n) // ctx.world_size
    # Of fewer tiles than ranks, the last rank owns all.
    owner = tl.where(share == 0, ctx.world_size - 1, src_view.tile_id(tile) // tl.maximum(share, 1))
    owner = tl.minimum(owner, ctx.world_size - 1)
    reduce(tile, src_view, dst_view, owner, ctx, flags_ptr, epoch)
