"""Rows in fp8 over a scale each, or over one that is given: by one kernel, or in a graph by torch's operations.

The compiler fuses these with what is before them. Both divide and round as IEEE 754 says, so that their results are the
same bits, unless a compiler's division does not: Inductor's on GPUs may be off by a bit of the scale.
"""

from __future__ import annotations

import torch

from ..operators.product import in_graph
from ..portable.quantise import QUANTISE_WARPS, quantise_arguments
from ..portable.quantise import quantise_rows as kernel
from .scales import scale_by_largest


def quantise_rows(
    matrix: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in fp8, rows contiguous, and its fp32 scale, (rows, 1), or the one that is given.

    By its scale the largest magnitude of a row becomes the largest of the format, as by `scales.quantise`. What is
    larger than a given scale allows becomes the largest of the format.

    Args:
        matrix: (rows, columns), bf16, fp16 or fp32, of any strides; copied where rows are not contiguous.
        dtype: an fp8 format.
        scale: () or (1,), fp32, of the whole matrix, on its device; None for one a row.
    """
    if in_graph():
        return _quantise_with_torch(matrix, dtype, scale)
    rows, columns = matrix.shape
    small = torch.empty(rows, columns, dtype=dtype, device=matrix.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=matrix.device) if scale is None else scale
    if small.numel():
        source = matrix if matrix.stride(1) == 1 else matrix.contiguous()  # which a transposed weight is not
        kernel[(rows,)](**quantise_arguments(source, small, scales), num_warps=QUANTISE_WARPS)
    return small, scales


def _quantise_with_torch(
    matrix: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, most = matrix.float(), torch.finfo(dtype).max
    if scale is None:
        scale = scale_by_largest(wide, (1,), most)
    return (wide / scale).clamp(-most, most).to(dtype).contiguous(), scale
