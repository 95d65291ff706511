"""Quantising to fp8 by rows: a row's scale makes its largest element the largest number of the format.

`row_scale` is shared with the norm of rows (row_norm.py), which quantises what it has normed. `quantise_rows` is a
kernel for rows that are there, such as a shard that is to be gathered; `iris_kernels.common.fp8.scales.quantise` gives
the same with torch, bit for bit.

A row that holds an infinity or a NaN has an infinite scale: so all of it that is multiplied becomes NaN, and is seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..fp8.scales import LEAST_LARGEST
from .gemm import rounded

QUANTISE_WARPS = 8
ELEMENTS_OF_A_THREAD = 32  # of a row, in registers: with 8 warps 8192 columns
_LEAST_LARGEST = tl.constexpr(LEAST_LARGEST)


def columns_at_once(columns: int, num_warps: int) -> int:
    """Return how many columns of a row a program has in registers: all of them, up to what it has room for."""
    return min(triton.next_power_of_2(columns), 32 * num_warps * ELEMENTS_OF_A_THREAD)


class Quantised(NamedTuple):
    """A matrix of `columns` columns, and where its rows go in fp8, contiguous, with their scales (rows,), fp32."""

    src_ptr: Any
    dst_ptr: Any
    scales_ptr: Any
    columns: int
    stride_src_m: int
    stride_src_k: int
    stride_dst_m: int


def quantise_arguments(matrix: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor) -> dict[str, Any]:
    """Return what `quantise_rows` takes, a program per row.

    Args:
        matrix: (rows, columns), of any strides.
        quantised: (rows, columns), fp8, rows contiguous.
        scales: (rows, 1), fp32, contiguous; or of one element, of the whole matrix, which is then read.
    """
    columns = matrix.shape[1]
    assert quantised.shape == matrix.shape, f"{quantised.shape}, expected {matrix.shape}"
    assert scales.is_contiguous()
    strides = (*matrix.stride(), quantised.stride(0))
    return {
        "rows": Quantised(matrix, quantised, scales, columns, *strides),
        "COLS": columns_at_once(columns, QUANTISE_WARPS),
        "LARGEST": torch.finfo(quantised.dtype).max,
        "IS_GIVEN": scales.ndim < 2,
    }


@triton.jit
def row_scale(largest, LARGEST: tl.constexpr):
    """Return the scale of a row by its largest magnitude, where that of the format is LARGEST."""
    return tl.div_rn(tl.maximum(largest, _LEAST_LARGEST), LARGEST)


@triton.jit
def quantise_rows(rows, COLS: tl.constexpr, LARGEST: tl.constexpr, IS_GIVEN: tl.constexpr):
    """Quantise a row per program, COLS columns at once; with IS_GIVEN by the one scale that is there."""
    row = tl.program_id(0)
    kept = _load(rows, row, 0, COLS)
    if IS_GIVEN:
        scale = tl.load(rows.scales_ptr + tl.arange(0, 1))
    else:
        largest = _magnitude(kept)
        for start in range(COLS, rows.columns, COLS):
            largest = tl.maximum(largest, _magnitude(_load(rows, row, start, COLS)))
        scale = row_scale(tl.max(largest, axis=1), LARGEST)
        tl.store(rows.scales_ptr + row + tl.arange(0, 1), scale)
    _store(kept, scale, rows, row, 0, COLS, LARGEST, IS_GIVEN)
    for start in range(COLS, rows.columns, COLS):
        _store(_load(rows, row, start, COLS), scale, rows, row, start, COLS, LARGEST, IS_GIVEN)


@triton.jit
def _magnitude(value):
    """Return magnitudes; of a NaN, which a maximum passes over, infinity."""
    return tl.where(value == value, tl.abs(value), float("inf"))


@triton.jit
def _load(rows, row, start, COLS: tl.constexpr):
    """Return columns of a row, fp32 (1, COLS); zeros past its end."""
    cols = start + tl.arange(0, COLS)
    offsets = tl.cast(row, tl.int64) * rows.stride_src_m + cols.to(tl.int64) * rows.stride_src_k
    return tl.load(rows.src_ptr + offsets, mask=cols < rows.columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store(value, scale, rows, row, start, COLS: tl.constexpr, LARGEST: tl.constexpr, IS_GIVEN: tl.constexpr):
    cols = start + tl.arange(0, COLS)
    offsets = tl.cast(row, tl.int64) * rows.stride_dst_m + cols
    # Not times the reciprocal, which rounds twice; the rows travel, and take longer to do that.
    scaled = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    if IS_GIVEN:  # by an own scale, no element is larger
        scaled = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(
        rows.dst_ptr + offsets[None, :],
        rounded(scaled, rows.dst_ptr.dtype.element_ty),
        mask=(cols < rows.columns)[None, :],
    )
