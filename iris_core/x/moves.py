"""Collectives that move tiles and compute nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from .access import load_tile, on_rank
from .epochs import DONE, READY, barrier_all, begin_call, flags_of


@triton.jit
def all_gather(tile, src_view, dst_view, dim: tl.constexpr, ctx, flags_ptr=None, epoch=None):
    """Give every rank all ranks' tiles: each rank stores its own to all outputs.

    Edge: what each rank's program did before its call happens before the stores to its output; the stores happen before
    what any of these programs does after its call.

    Args:
        tile: a `TileView`, of `src_view`.
        src_view: this rank's part, (M, N), in any memory of this rank.
        dst_view: the output, on the heap: (world_size * M, N) for `dim` 0, (M, world_size * N) for 1.
        dim: the dimension along which parts are put together, in the order of the ranks.
        ctx: a `RankContext`.
        flags_ptr, epoch: as of `all_reduce_one_shot`.
    """
    flags = flags_of(flags_ptr, src_view.tile_id(tile), ctx)
    number = begin_call(flags, epoch, ctx)
    value = load_tile(src_view, tile)
    _, mask = src_view.tile_ptr(tile)
    barrier_all(flags, number, READY, ctx)
    for step in range(ctx.world_size):
        peer = (ctx.rank + step) % ctx.world_size
        if dim == 0:
            pointers, mask = on_rank(dst_view, peer, ctx).offset_tile_ptr(tile, ctx.rank * src_view.M, 0, mask)
        else:
            pointers, mask = on_rank(dst_view, peer, ctx).offset_tile_ptr(tile, 0, ctx.rank * src_view.N, mask)
        tl.store(pointers, value, mask=mask)
    barrier_all(flags, number, DONE, ctx)
