"""Scaled products of fp8: that of each step of 128 of k is promoted, which is added in fp32, if that is asked for.

The tensor cores of sm_90 keep fewer bits of a sum of fp8 products than fp32 has. So each step's product starts anew, in
registers of its own, and is added to the tile's sum while the tensor cores have something else:

| scales | columns of a tile | while a product is added, the tensor cores multiply |
|---|---|---|
| of whole sums, or none | 128 at most, as there are three accumulators | the next step: two products take turns |
| of blocks of k | 256, by halves, or fewer | what the other warp group has begun, half a product later or more |

With scales of blocks in turns, the assembler would wait for each product before it scales and adds another. Without
them halves are slower: 8192x8192x28672 over two H200s, a reduce-scatter, takes 1.63 ms by halves and 1.50 in turns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init, warpgroup_mma_wait

from ..device.scaling import scaled
from .arguments import RowScales
from .gluon_names import thread_barrier
from .pipeline import (
    accumulator_layout,
    consumer_release,
    consumer_wait,
    multiply_step,
    next_state,
    pipeline_state,
    previous_index,
    zero_tile,
)

_SCALE_BLOCK = gl.constexpr(128)
_HALF_COLUMNS = gl.constexpr(128)


@gluon.jit
def row_scales(staging, work, rank):
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
def multiply_in_turns(pipeline, number, num_steps, TILE: gl.constexpr):
    """As `multiply_tile`, promoted: a step is multiplied while the product of the one before is added."""
    acc = zero_tile(pipeline, TILE.BLOCK_N, TILE)
    even = warpgroup_mma_init(zero_tile(pipeline, TILE.BLOCK_N, TILE))
    odd = warpgroup_mma_init(zero_tile(pipeline, TILE.BLOCK_N, TILE))
    state = pipeline_state(pipeline.barriers, number)
    for k in range(0, num_steps - 1, 2):
        even = _begin_step(pipeline, state, even, TILE)
        acc = _add_step(pipeline, state, acc, odd, 1, k > 0)
        state = next_state(pipeline.barriers, state)
        odd = _begin_step(pipeline, state, odd, TILE)
        acc = _add_step(pipeline, state, acc, even, 1, True)
        state = next_state(pipeline.barriers, state)
    if num_steps % 2 == 1:
        even = _begin_step(pipeline, state, even, TILE)
        acc = _add_step(pipeline, state, acc, odd, 1, num_steps > 1)
        state = next_state(pipeline.barriers, state)
        acc = _add_step(pipeline, state, acc, even, 0, True)
    else:
        acc = _add_step(pipeline, state, acc, odd, 0, True)
    return acc


@gluon.jit
def _begin_step(pipeline, state, product, TILE: gl.constexpr):
    """Begin a step's product when its operands are there; return it."""
    consumer_wait(pipeline.barriers, state)
    return multiply_step(pipeline, state, product, False, 0, TILE.BLOCK_N, TILE)


@gluon.jit
def _add_step(pipeline, state, acc, product, IN_FLIGHT: gl.constexpr, has_step):
    """Return a sum plus the product of the step before that of `state`, if there is one, and release its stage.

    IN_FLIGHT: how many products after it are being multiplied.
    """
    product = warpgroup_mma_wait(IN_FLIGHT, deps=[product])
    thread_barrier()  # the arrival is one thread's
    consumer_release(pipeline.barriers, previous_index(pipeline.barriers, state), pred=has_step)
    return acc + product


@gluon.jit
def multiply_by_halves(pipeline, staging, number, num_steps, index, rank, TILE: gl.constexpr):
    """As `multiply_tile`, each step's product times its blocks' scales: 128 columns first, then the others, if any.

    While a half is waited for and added, the tensor cores have the other warp group's product. So the groups must not
    meet while they have nothing to multiply: what takes a barrier, in the source or by the compiler, lies between the
    begin and the end of a step's last product. That is to release the stage of the step before, and to wait for the
    operands of the next one.
    """
    COLS: gl.constexpr = min(TILE.BLOCK_N, _HALF_COLUMNS)
    LAST: gl.constexpr = TILE.BLOCK_N // COLS - 1
    left = zero_tile(pipeline, COLS, TILE)
    right = zero_tile(pipeline, COLS, TILE)
    product = zero_tile(pipeline, COLS, TILE)
    blocks = _blocks_of_tile(left, staging, index, rank, TILE)
    state = pipeline_state(pipeline.barriers, number)
    consumer_wait(pipeline.barriers, state)
    scales = _block_scales(blocks, 0)  # a peer's are there when its rows of A are
    for k in range(num_steps):
        if LAST > 0:
            in_flight = multiply_step(pipeline, state, product, False, 0, COLS, TILE)
            product = warpgroup_mma_wait(0, deps=[in_flight])
            left = _add_scaled(left, product, scales, 0)
        in_flight = multiply_step(pipeline, state, product, False, LAST * COLS, COLS, TILE)
        thread_barrier()  # the arrival is one thread's
        consumer_release(pipeline.barriers, previous_index(pipeline.barriers, state), pred=k > 0)
        state = next_state(pipeline.barriers, state)
        consumer_wait(pipeline.barriers, state, pred=k + 1 < num_steps)
        next_scales = _block_scales(blocks, gl.minimum(k + 1, num_steps - 1))
        product = warpgroup_mma_wait(0, deps=[in_flight])
        right = _add_scaled(right, product, scales, LAST)
        scales = next_scales
    thread_barrier()
    consumer_release(pipeline.barriers, previous_index(pipeline.barriers, state))
    if LAST > 0:
        BLOCK_M: gl.constexpr = TILE.BLOCK_M
        BLOCK_N: gl.constexpr = TILE.BLOCK_N
        LAYOUT: gl.constexpr = accumulator_layout(gl.num_warps(), pipeline.a.dtype, BLOCK_N)
        both = gl.join(left, right).permute([0, 2, 1]).reshape([BLOCK_M, BLOCK_N])
        return gl.convert_layout(both, LAYOUT)
    else:
        return right


@gluon.jit
def _blocks_of_tile(acc, staging, index, rank, TILE: gl.constexpr):
    """Return where the scales of a tile's blocks are: of its rows, of which there are so many, and of its columns."""
    work = TILE.SCHEDULER(index, staging.tiled, rank, TILE)
    scales, gemm = row_scales(staging, work, rank), staging.scales
    rows = scales.row + gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(1, acc.type.layout))
    # A tile that is all past the end has the last block; nobody stores what is made of it.
    first = gl.minimum(work.b_col, gemm.columns - 1) // _SCALE_BLOCK
    last = (gl.minimum(work.b_col + TILE.BLOCK_N, gemm.columns) - 1) // _SCALE_BLOCK
    of_columns = gemm.b_scale_ptr + first * gemm.stride_bsn
    is_row = rows < scales.rows
    row_ptrs = scales.ptr + rows * scales.stride_m
    return row_ptrs, is_row, scales.stride_k, of_columns, gemm.stride_bsk, (last - first) * gemm.stride_bsn


@gluon.jit
def _block_scales(blocks, step):
    """Return the scales of a step's blocks: of the tile's rows, and of its first and its last 128 columns."""
    row_ptrs, is_row, stride_k, column_ptr, stride_bk, last_column = blocks
    # .cg: a peer may have stored it past this SM's L1, which may hold an older call's.
    of_rows = gl.load(row_ptrs + step * stride_k, mask=is_row, other=0.0, cache_modifier=".cg")
    column_ptr += step * stride_bk
    return of_rows, gl.load(column_ptr), gl.load(column_ptr + last_column)


@gluon.jit
def _add_scaled(acc, product, scales, COLUMN: gl.constexpr):
    """Return a sum plus a step's product, of the COLUMN-th 128 columns of the tile, times its scales."""
    return acc + product * (scales[0] * scales[1 + COLUMN])[:, None]
