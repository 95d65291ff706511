"""Activations in fp8: rows of a matrix over a scale each, or over one that is given, in one kernel.

A program takes a block of rows and goes over their columns twice: for the largest magnitude, and to divide and round.
In a graph of `torch.compile` the same is done by torch's operations, which the compiler fuses with what is before them.
Both divide and round as IEEE 754 says, so their results are the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .operators.torch_op import in_graph
from .portable.gemm import rounded

_MOST_COLUMNS = 8192  # of a row at once: 32 elements a thread of 8 warps
_TILE = (32, 128)  # of a matrix whose columns are contiguous, such as a weight that is read transposed


def quantise_rows(
    matrix: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in fp8, rows contiguous, and its fp32 scale, (rows, 1), or the one that is given.

    By its scale the largest magnitude of a row becomes the largest of the format; that of a row of zeros is 1. What is
    larger than a given scale allows becomes the largest of the format.

    Args:
        matrix: (rows, columns), bf16, fp16 or fp32, of any strides.
        dtype: an fp8 format.
        scale: () or (1,), fp32, of the whole matrix, on its device; None for one a row.
    """
    if in_graph():
        return _quantise_with_torch(matrix, dtype, scale)
    rows, columns = matrix.shape
    small = torch.empty(rows, columns, dtype=dtype, device=matrix.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=matrix.device) if scale is None else scale
    if not small.numel():
        return small, scales
    if matrix.stride(0) == 1 and matrix.stride(1) > 1:
        block_m, block_n = _TILE
    else:
        block_m, block_n = 1, min(triton.next_power_of_2(columns), _MOST_COLUMNS)
    quantise_rows_kernel[(triton.cdiv(rows, block_m),)](
        matrix,
        small,
        scales,
        rows,
        columns,
        *matrix.stride(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        LARGEST=torch.finfo(dtype).max,
        IS_GIVEN=scale is not None,
        num_warps=8,
    )
    return small, scales


def _quantise_with_torch(
    matrix: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, most = matrix.float(), torch.finfo(dtype).max
    if scale is None:
        scale = wide.abs().amax(1, keepdim=True) / most
        scale = torch.where(scale > 0, scale, 1.0)
    return (wide / scale).clamp(-most, most).to(dtype).contiguous(), scale


@triton.jit
def quantise_rows_kernel(
    matrix_ptr,
    small_ptr,
    scales_ptr,
    rows,
    columns,
    stride_m,
    stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_GIVEN: tl.constexpr,
):
    """Quantise BLOCK_M rows; with IS_GIVEN `scales_ptr` is read, one scale for all."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    is_row = row < rows
    row = row.to(tl.int64)
    if IS_GIVEN:
        scale = tl.load(scales_ptr + row * 0)
    else:
        largest = tl.zeros([BLOCK_M, 1], tl.float32)
        for start in range(0, columns, BLOCK_N):
            column = start + tl.arange(0, BLOCK_N)[None, :]
            source = matrix_ptr + row * stride_m + column.to(tl.int64) * stride_n
            value = tl.load(source, mask=is_row & (column < columns), other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(value), axis=1)[:, None])
        scale = tl.div_rn(largest, tl.full([BLOCK_M, 1], LARGEST, tl.float32))
        scale = tl.where(scale > 0.0, scale, 1.0)
        tl.store(scales_ptr + row, scale, mask=is_row)
    for start in range(0, columns, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)[None, :]
        mask = is_row & (column < columns)
        source = matrix_ptr + row * stride_m + column.to(tl.int64) * stride_n
        value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
        destination = small_ptr + row * columns + column
        tl.store(destination, rounded(value, small_ptr.dtype.element_ty), mask=mask)
