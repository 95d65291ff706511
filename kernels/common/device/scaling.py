"""Scales of fp8 operands (../fp8/scales.py) in both main loops: what a sum of products is multiplied by, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from ..fp8.scales import SCALE_BLOCK

# What scales multiply.
NO_SCALES = tl.constexpr(0)
WHOLE_SUMS = tl.constexpr(1)  # a sum over k, by the scales of its row and its column; each may be that of the tensor
BLOCK_SUMS = tl.constexpr(2)  # the sum over each block of k, by the scales of these blocks

_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def scaled(acc, a_scale_ptr, stride_asm, stride_ask, gemm, a_rows, is_row, cols, start, SCALES: tl.constexpr):
    """Return a sum of products times the scales of its rows of A and its columns of B.

    Args:
        acc: fp32 (ROWS, COLS).
        a_scale_ptr, stride_asm, stride_ask: of the A that was multiplied.
        gemm: the `Gemm` with B's.
        a_rows, is_row: the rows of A, in the layout of the dimension, and which of them there are.
        cols: the columns of B.
        start: where in k the sum begins.
        SCALES: what is multiplied.
    """
    if SCALES == BLOCK_SUMS:
        step = start // _SCALE_BLOCK
        of_columns = cols // _SCALE_BLOCK
    else:
        step = 0
        of_columns = cols
    a_ptrs = a_scale_ptr + a_rows.to(tl.int64) * stride_asm + step * stride_ask
    b_ptrs = gemm.b_scale_ptr + step * gemm.stride_bsk + of_columns.to(tl.int64) * gemm.stride_bsn
    # .cg: a peer may have stored it past this SM's L1, which may hold an older call's.
    a_scale = tl.load(a_ptrs, mask=is_row, other=0.0, cache_modifier=".cg")
    b_scale = tl.load(b_ptrs, mask=cols < gemm.columns, other=0.0)
    return acc * a_scale[:, None] * b_scale[None, :]
