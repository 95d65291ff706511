"""The one GEMM of all families: main loop, epilogue stores.

A tile is named by its first row and column; operands are read through tensor descriptors (TMA) or pointers. Sizes need
not divide anything: descriptors fill with zeros past the end, pointers are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from iris_core import interpreted, translate

from ..device.arguments import Block, Epilogue
from ..device.epilogue import finish_tile, from_row
from ..device.scaling import BLOCK_SUMS, NO_SCALES, WHOLE_SUMS, scaled

# How operands are read. B's contiguous dimension decides the shape of its descriptor's block.
POINTERS = tl.constexpr(0)
DESCRIPTORS_B_KN = tl.constexpr(1)  # B row-major: rows of k are contiguous in n
DESCRIPTORS_B_NK = tl.constexpr(2)  # B column-major, the transpose of a Linear's weight: contiguous in k


@triton.jit
def shard_of(block, work):
    """Return the rows of a block that are a work tile's shard, as a block."""
    c_ptr = block.c_ptr + tl.cast(work.start, tl.int64) * block.stride_cm
    return Block(c_ptr, work.m, block.n, block.stride_cm, from_row(block.epilogue, work.start))


@triton.jit
def unfinished_block(c_ptr, m, n, stride_cm):
    """Return a block of what is not yet C, such as partial sums: nothing is done to its tiles."""
    return Block(c_ptr, m, n, stride_cm, Epilogue((), ()))


@triton.jit
def matmul_steps(a, a_scale_ptr, b, gemm, block, row, col, a_row, first_k, stop_k, TILE: tl.constexpr):
    """Return the tile of A @ B that starts at (row, col) of a block, fp32 (BLOCK_M, BLOCK_N), summed over steps of k.

    `a_row` is the row of A that belongs to the block's row `row`; A's scales are at `a_scale_ptr`. The steps begin from
    `first_k`, a multiple of BLOCK_K, to `stop_k`.
    """
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    a_rows = a_row - row + rows
    if TILE.LOADS == POINTERS:
        ks = tl.arange(0, BLOCK_K)
        first_ks = (first_k + ks).to(tl.int64)
        a_ptrs = a + a_rows.to(tl.int64)[:, None] * gemm.stride_am + first_ks[None, :] * gemm.stride_ak
        b_ptrs = b + first_ks[:, None] * gemm.stride_bk + cols.to(tl.int64)[None, :] * gemm.stride_bn
        for start in range(first_k, stop_k, BLOCK_K):
            in_k = ks < gemm.k - start
            a_tile = tl.load(a_ptrs, mask=(rows < block.m)[:, None] & in_k[None, :], other=0.0)
            b_tile = tl.load(b_ptrs, mask=in_k[:, None] & (cols < block.n)[None, :], other=0.0)
            acc = add_product(acc, a_tile, b_tile, a_scale_ptr, gemm, a_rows, rows < block.m, cols, start, TILE)
            a_ptrs += tl.cast(gemm.stride_ak, tl.int64) * BLOCK_K
            b_ptrs += tl.cast(gemm.stride_bk, tl.int64) * BLOCK_K
    else:
        for start in range(first_k, stop_k, BLOCK_K):
            a_tile = a.load([a_row, start])
            if TILE.LOADS == DESCRIPTORS_B_NK:
                b_tile = b.load([col, start]).T
            else:
                b_tile = b.load([start, col])
            acc = add_product(acc, a_tile, b_tile, a_scale_ptr, gemm, a_rows, rows < block.m, cols, start, TILE)
    if TILE.SCALES == WHOLE_SUMS:
        strides = (gemm.stride_asm, gemm.stride_ask)
        acc = scaled(acc, a_scale_ptr, *strides, gemm, a_rows, rows < block.m, cols, first_k, TILE.SCALES)
    return acc


@triton.jit
def add_product(acc, a_tile, b_tile, a_scale_ptr, gemm, a_rows, is_row, cols, start, TILE: tl.constexpr):
    """Return a sum with the product of a step of k more, which begins at `start`; `scaled` has the other arguments."""
    tl.static_assert(TILE.SCALES == NO_SCALES or a_scale_ptr is not None)
    if TILE.SCALES == BLOCK_SUMS:
        product, strides = tl.dot(a_tile, b_tile), (gemm.stride_asm, gemm.stride_ask)
        return acc + scaled(product, a_scale_ptr, *strides, gemm, a_rows, is_row, cols, start, TILE.SCALES)
    else:
        return tl.dot(a_tile, b_tile, acc, input_precision="ieee", max_num_imprecise_acc=TILE.MOST_IMPRECISE)


@triton.jit
def rounded(acc, dtype: tl.constexpr):
    """Return a sum in the output's dtype, rounded to nearest even."""
    if interpreted() and dtype == tl.bfloat16:  # the interpreter truncates; round to nearest even, as hardware does
        bits = acc.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return tl.where(acc == acc, nearest, acc.to(tl.bfloat16))
    else:
        return acc.to(dtype)


@triton.jit
def store_tile(acc, block, row, col, peers, DESTINATIONS: tl.constexpr, TILE: tl.constexpr):
    """Finish a tile, round it, store it to DESTINATIONS ranks: this one, then its peers in the order rank+1, …."""
    SUBTILES: tl.constexpr = TILE.SUBTILES
    COLS: tl.constexpr = TILE.BLOCK_N // SUBTILES
    for index in tl.static_range(SUBTILES):
        half = subtile(acc, index, TILE)
        store_subtile(half, block, row, col + index * COLS, peers, DESTINATIONS, TILE.BLOCK_M, COLS, TILE)


@triton.jit
def subtile(acc, INDEX: tl.constexpr, TILE: tl.constexpr):
    """Return a tile, or with two SUBTILES its left or right half; `acc` may be the two."""
    if not isinstance(acc, tl.tensor):
        return acc[INDEX]
    elif TILE.SUBTILES == 1:
        return acc
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (TILE.BLOCK_M, 2, TILE.BLOCK_N // 2)), (0, 2, 1)))
        if INDEX == 0:
            return left
        else:
            return right


@triton.jit
def store_subtile(
    acc, block, row, col, peers, DESTINATIONS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr
):
    """Finish and round a subtile of a block that starts at (row, col) and store it, as `store_tile` does a tile."""
    NARROWING: tl.constexpr = TILE.NARROWING
    if NARROWING > 1:
        finished = Block(block.c_ptr, block.m, block.n // NARROWING, block.stride_cm, block.epilogue)
        offsets, mask = subtile_offsets(finished, row, col // NARROWING, ROWS, COLS // NARROWING)
    else:
        offsets, mask = subtile_offsets(block, row, col, ROWS, COLS)
    value = rounded(finish_tile(acc, block.epilogue, row, col, ROWS, COLS, TILE), block.c_ptr.dtype.element_ty)
    tl.store(block.c_ptr + offsets, value, mask=mask)
    for distance in tl.static_range(1, DESTINATIONS):
        # The scalar base is translated, once a peer: a block of translated pointers costs registers.
        peer_ptr = translate(block.c_ptr, peers.rank, (peers.rank + distance) % TILE.WORLD_SIZE, peers.heap_bases)
        tl.store(peer_ptr + offsets, value, mask=mask)


@triton.jit
def subtile_offsets(block, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the offsets of a subtile of a block that starts at (row, col), and the mask of what is in it."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    offsets = rows.to(tl.int64)[:, None] * block.stride_cm + cols[None, :]
    return offsets, (rows < block.m)[:, None] & (cols < block.n)[None, :]
