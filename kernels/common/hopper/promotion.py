"""Scaled products of fp8: that of each step of 128 of k is promoted, which is added in fp32, if that is asked for.

The tensor cores of sm_90 keep fewer bits of a sum of fp8 products than fp32 has. So each step's product starts anew, in
registers of its own, and is added to the tile's sum while the next step is multiplied: two products take turns, and
with the sum they are three accumulators, of 128 columns at most.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ..device.scaling import BLOCK_SUMS, WHOLE_SUMS, scaled
from .arguments import RowScales
from .barrier import thread_barrier
from .epilogue_store import by_columns
from .pipeline import (
    consumer_release,
    consumer_wait,
    multiply_step,
    multiply_tile,
    next_state,
    pipeline_state,
    zero_tile,
)

_SCALE_BLOCK = gl.constexpr(128)


@gluon.jit
def multiply_scaled(
    pipeline, staging, wave, number, split_start, num_steps, index, rank, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    """Return the tile of an index, as `multiply_tile` does, promoted where that is asked for, and scaled."""
    if TILE.IS_PROMOTED:
        acc = _multiply_promoted(pipeline, staging, number, split_start, num_steps, index, rank, WORLD_SIZE, TILE)
    else:
        acc = multiply_tile(pipeline, wave, number, num_steps, TILE)
    if TILE.SCALES == WHOLE_SUMS:
        # Not kept since the tile was scheduled: the multiplication takes the registers.
        work = TILE.SCHEDULER(index, staging.tiled, rank, WORLD_SIZE, TILE)
        scales = _row_scales(staging, work, rank)
        acc = by_columns(acc, scale_columns, (scales, staging.scales), scales.row, work.b_col, TILE)
    return acc


@gluon.jit
def _row_scales(staging, work, rank):
    """Return where the scales of a work tile's rows of A are: of this rank's shard, or of the gathered A."""
    of_all, own = staging.scales, staging.own
    if own is None:
        return RowScales(of_all.a_scale_ptr, of_all.stride_asm, of_all.stride_ask, work.a_row, of_all.rows)
    else:
        is_own = work.owner == rank
        return RowScales(
            gl.where(is_own, own.a_scale_ptr, of_all.a_scale_ptr),
            gl.where(is_own, own.stride_asm, of_all.stride_asm),
            gl.where(is_own, own.stride_ask, of_all.stride_ask),
            gl.where(is_own, work.row, work.a_row),
            gl.where(is_own, own.rows, of_all.rows),
        )


@gluon.jit
def scale_columns(acc, scales, rows, cols, TILE: gl.constexpr):
    """Return columns of a sum over k times their scales and those of its rows; `scales`: (RowScales, Gemm)."""
    of_rows, gemm = scales
    strides = (of_rows.stride_m, of_rows.stride_k)
    return scaled(acc, of_rows.ptr, *strides, gemm, rows, rows < of_rows.rows, cols, 0, TILE.SCALES)


@gluon.jit
def _multiply_promoted(
    pipeline, staging, number, start, num_steps, index, rank, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    """As `multiply_tile`, promoted; the first step is the `start`-th of the tile."""
    acc = zero_tile(pipeline, TILE)
    even = zero_tile(pipeline, TILE)
    odd = zero_tile(pipeline, TILE)
    blocks = _blocks_of_tile(acc, staging, index, rank, WORLD_SIZE, TILE)
    of_odd = _factors(blocks, start, TILE)
    state = pipeline_state(pipeline.barriers, number)
    for k in range(start, start + num_steps - 1, 2):
        consumer_wait(pipeline.barriers, state)
        even = multiply_step(pipeline, state, even, False, TILE)
        of_even = _factors(blocks, k, TILE)
        acc = _add(acc, odd, of_odd, TILE)
        even, state = _end_step(pipeline, state, even)
        consumer_wait(pipeline.barriers, state)
        odd = multiply_step(pipeline, state, odd, False, TILE)
        of_odd = _factors(blocks, k + 1, TILE)
        acc = _add(acc, even, of_even, TILE)
        odd, state = _end_step(pipeline, state, odd)
    acc = _add(acc, odd, of_odd, TILE)
    if num_steps % 2 == 1:
        consumer_wait(pipeline.barriers, state)
        even = multiply_step(pipeline, state, even, False, TILE)
        of_even = _factors(blocks, start + num_steps - 1, TILE)
        even, _ = _end_step(pipeline, state, even)
        acc = _add(acc, even, of_even, TILE)
    return acc


@gluon.jit
def _end_step(pipeline, state, product):
    """Wait for a step's product and release its stage; return it, and the state of the next step."""
    product = warpgroup_mma_wait(0, deps=[product])
    thread_barrier()  # the arrival is one thread's
    consumer_release(pipeline.barriers, state.index)
    return product, next_state(pipeline.barriers, state)


@gluon.jit
def _blocks_of_tile(acc, staging, index, rank, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Return where the scales of a tile's blocks are: of its rows, of which there are so many, and of its columns."""
    if TILE.SCALES == BLOCK_SUMS:
        work = TILE.SCHEDULER(index, staging.tiled, rank, WORLD_SIZE, TILE)
        scales, gemm = _row_scales(staging, work, rank), staging.scales
        rows = scales.row + gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(1, acc.type.layout))
        of_columns = gemm.b_scale_ptr + work.b_col // _SCALE_BLOCK * gemm.stride_bsn
        return scales.ptr + rows * scales.stride_m, rows < scales.rows, scales.stride_k, of_columns, gemm.stride_bsk
    else:
        return ()


@gluon.jit
def _factors(blocks, step, TILE: gl.constexpr):
    """Return what multiplies the rows of a step's product, in one block of k and of columns."""
    if TILE.SCALES == BLOCK_SUMS:
        row_ptrs, is_row, stride_k, column_ptr, stride_bk = blocks
        # .cg: a peer may have stored it past this SM's L1, which may hold an older call's.
        of_rows = gl.load(row_ptrs + step * stride_k, mask=is_row, other=0.0, cache_modifier=".cg")
        return of_rows * gl.load(column_ptr + step * stride_bk)
    else:
        return 1.0


@gluon.jit
def _add(acc, product, factors, TILE: gl.constexpr):
    """Return a sum plus a step's product."""
    if TILE.SCALES == BLOCK_SUMS:
        product = product * factors[:, None]
    return acc + product
