"""Collectives that move tiles and compute nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from .access import load_tile, on_rank, store_tile, store_to_all
from .epochs import DONE, READY, barrier_all, begin_call, done_by, flags_of, ready_for


@triton.jit
def all_gather(tile, src_view, dst_view, dim: tl.constexpr, ctx, flags_ptr=None, epoch=None):
    """Give every rank all ranks' tiles: each rank stores its own to all outputs.

    Edge: what each rank's program did before its call happens before the stores to its output; the stores happen before
    what any of these programs does after its call.

    Args:
        tile: a `TileView`, of `src_view`.
        src_view: this rank's shard, (M, N), in any memory of this rank.
        dst_view: the output, on the heap: (world_size * M, N) for `dim` 0, (M, world_size * N) for 1.
        dim: the dimension along which parts are put together, in the order of the ranks.
        ctx: a `DeviceContext`.
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
            pointers, part = on_rank(dst_view, peer, ctx).offset_tile_ptr(tile, ctx.rank * src_view.M, 0, mask)
        else:
            pointers, part = on_rank(dst_view, peer, ctx).offset_tile_ptr(tile, 0, ctx.rank * src_view.N, mask)
        tl.store(pointers, value, mask=part)
    barrier_all(flags, number, DONE, ctx)


@triton.jit
def all_to_all(tile, src_view, dst_view, N_per_rank: tl.constexpr, ctx, flags_ptr=None, epoch=None):
    """Exchange blocks of columns: block p of a rank's input becomes, on rank p, the block with this rank's number.

    Each rank loads what a tile of its output needs; a tile may reach over several blocks.
    Edge: what each rank's program for this tile did before its call happens before the loads; the loads happen before
    what any of these programs does after its call. What other programs have stored of the inputs is not ordered:
    inputs are of earlier kernels, or a tile's columns lie in the same place of each block.

    Args:
        tile: a `TileView`, of `dst_view`.
        src_view: the inputs, (M, world_size * N_per_rank), on the heap.
        dst_view: the output, of the same size, in memory of this rank; not `src_view`.
        N_per_rank: columns of a block.
        ctx: a `DeviceContext`.
        flags_ptr, epoch: as of `all_reduce_one_shot`.
    """
    flags = flags_of(flags_ptr, dst_view.tile_id(tile), ctx)
    number = begin_call(flags, epoch, ctx)
    barrier_all(flags, number, READY, ctx)
    ctx.all_to_all(tile, src_view, dst_view, N_per_rank)
    barrier_all(flags, number, DONE, ctx)


@triton.jit
def gather(tile, src_view, source_rank, ctx):
    """Return a rank's tile, zero outside the matrix. It orders nothing: see `wait`, or have a barrier before it.

    Args:
        tile: a `TileView`.
        src_view: the matrix, on the heap.
        source_rank: the rank to load from; it may be the calling one.
        ctx: a `DeviceContext`.
    """
    return ctx.gather(tile, src_view, source_rank)


@triton.jit
def broadcast(tile, src_view, dst_view, source_rank, ctx, flags_ptr=None, epoch=None):
    """Store one rank's tile to all outputs.

    Edge: what each rank's program did before its call happens before the stores to its output; these happen before
    what any of these programs does after its call.

    Args:
        tile: a `TileView`.
        src_view: the tile's matrix on `source_rank`, in any memory of it; others give a matrix of the same size.
        dst_view: the output, on the heap.
        source_rank: the rank whose tile it is.
        ctx: a `DeviceContext`.
        flags_ptr, epoch: as of `all_reduce_one_shot`.
    """
    flags = flags_of(flags_ptr, dst_view.tile_id(tile), ctx)
    number = begin_call(flags, epoch, ctx)
    ready_for(source_rank, flags, number, ctx)
    if ctx.rank == source_rank:
        store_to_all(dst_view, tile, load_tile(src_view, tile), ctx)
    done_by(source_rank, flags, number, ctx)


@triton.jit
def scatter(tile, src_view, dst_view, dim: tl.constexpr, source_rank, ctx, flags_ptr=None, epoch=None):
    """Store to each rank's output its part of one rank's matrix.

    Edge: that of `broadcast`.

    Args:
        tile: a `TileView`, of `dst_view`.
        src_view: the whole on `source_rank`, in any memory of it: (world_size * M, N) for `dim` 0, (M, world_size * N)
            for 1. Others give a matrix of the same size.
        dst_view: the output, (M, N), on the heap.
        dim: the dimension that is cut, in the order of the ranks.
        source_rank: the rank whose matrix it is.
        ctx: a `DeviceContext`.
        flags_ptr, epoch: as of `all_reduce_one_shot`.
    """
    flags = flags_of(flags_ptr, dst_view.tile_id(tile), ctx)
    number = begin_call(flags, epoch, ctx)
    ready_for(source_rank, flags, number, ctx)
    if ctx.rank == source_rank:
        _, mask = dst_view.tile_ptr(tile)
        for step in range(ctx.world_size):
            peer = (ctx.rank + step) % ctx.world_size
            if dim == 0:
                pointers, part = src_view.offset_tile_ptr(tile, peer * dst_view.M, 0, mask)
            else:
                pointers, part = src_view.offset_tile_ptr(tile, 0, peer * dst_view.N, mask)
            value = tl.load(pointers, mask=part, other=0, cache_modifier=".cg")
            store_tile(on_rank(dst_view, peer, ctx), tile, value)
    done_by(source_rank, flags, number, ctx)
