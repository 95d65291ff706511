"""Tiles to and from memory: this rank's and peers', with masks."""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.rma import translate
from ..device.tiles import accumulator
from .views import TensorView


@triton.jit
def on_rank(view, peer, ctx):
    """Return the view of the same matrix on another rank. The scalar base is translated: once a peer."""
    ptr = translate(view.ptr, ctx.rank, peer, ctx.heap_bases)
    return TensorView(ptr, view.M, view.N, view.stride_m, view.stride_n)


@triton.jit
def load_tile(view, tile):
    """Load a tile, zero outside the matrix. .cg: L1 may hold what this rank's memory held earlier."""
    pointers, mask = view.tile_ptr(tile)
    return tl.load(pointers, mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def store_tile(view, tile, value):
    """Store a tile, cast to the matrix's dtype."""
    pointers, mask = view.tile_ptr(tile)
    tl.store(pointers, value.to(view.ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_tiles(view, tile, ctx):
    """Return the sum of all ranks' tiles in the order of the ranks, in the dtype of `accumulator`."""
    total = accumulator(load_tile(on_rank(view, 0, ctx), tile))
    for peer in range(1, ctx.world_size):
        total += accumulator(load_tile(on_rank(view, peer, ctx), tile))
    return total


@triton.jit
def store_to_all(view, tile, value, ctx):
    """Store a tile on all ranks, first this one: ranks that begin with different peers do not crowd one link."""
    for step in range(ctx.world_size):
        store_tile(on_rank(view, (ctx.rank + step) % ctx.world_size, ctx), tile, value)
