"""The product of fp8 operands and their scales by torch: cuBLAS's, or hipBLASLt's; what baselines multiply with.

On a CPU the dequantised operands are multiplied in fp32.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ..portable.operands import rows_on_16_bytes
from ..problem import Problem
from .scales import dequantised

_MULTIPLE = 16  # of which k and n must be, for torch


def scaled_mm_reason(problem: Problem) -> str | None:
    """Return why torch cannot multiply a problem's fp8 operands on a GPU, or None."""
    if problem.dtype == problem.b_dtype == torch.float8_e5m2:
        return "torch multiplies no e5m2 by e5m2; ours do"
    (_, k), (_, n) = problem.a_shape(0), problem.b_shape(0)
    sizes = [k, n, *(problem.b_shape(rank)[0] for rank in range(problem.world_size))]
    if any(size % _MULTIPLE for size in (*sizes, problem.b_shape(problem.world_size - 1)[1])):
        return f"torch multiplies fp8 where k and n of each rank are multiples of {_MULTIPLE}; these are {k} and {n}"
    if "block" in problem.scales and not hasattr(F, "ScalingType"):
        return f"torch {torch.__version__} has no scales of blocks; 2.10 has"
    if "block" in problem.scales and not problem.dtype == problem.b_dtype == torch.float8_e4m3fn:
        return f"torch multiplies e4m3 alone where scales are of blocks, not {problem.dtype} by {problem.b_dtype}"
    return None


def multiply_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    scales: tuple[str, ...],
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    *,
    use_fast_accum: bool,
) -> None:
    """Make (a_scale · A) @ (b_scale · B) in C.

    Args:
        a, b: fp8 (m, k) and (k, n) of any strides; on a GPU copied in each call, unless rows of A and columns of B
            begin on 16 bytes.
        c: (m, n), bf16, fp16 or fp32.
        scales: of what A and B have a scale each (scales.py).
        a_scale, b_scale: these, fp32, in the shapes of `scale_shapes`; None without scales.
        use_fast_accum: as torch's.
    """
    if not a.is_cuda or not a.numel() or not b.numel():
        c.copy_(dequantised(a, a_scale) @ dequantised(b, b_scale))
        return
    a, b = rows_on_16_bytes(a), rows_on_16_bytes(b.t()).t()  # all that cuBLAS reads
    if a_scale is None or b_scale is None:
        a_scale = b_scale = a.new_ones((), dtype=torch.float32)
    if "block" in scales:
        c.copy_(_multiply_blocks(a, b, a_scale, b_scale, c.dtype, use_fast_accum))
        return
    multiply = functools.partial(torch._scaled_mm, a, b, use_fast_accum=use_fast_accum)
    if {"row", "column"} & set(scales):
        if not _scales_rows_into(c):
            one = a.new_ones((), dtype=torch.float32)
            c.copy_(multiply(one, one, out_dtype=torch.float32).mul_(a_scale).mul_(b_scale))
            return
        a_scale, b_scale = a_scale.expand(len(a), 1).contiguous(), b_scale.expand(1, b.shape[1]).contiguous()
    if c.is_contiguous():
        multiply(a_scale, b_scale, out_dtype=c.dtype, out=c)
    else:
        c.copy_(multiply(a_scale, b_scale, out_dtype=c.dtype))


def _scales_rows_into(c: torch.Tensor) -> bool:
    """Return whether torch makes a product with scales of rows in C's dtype: in bf16, and on Hopper in others.

    One that it made in bf16 would be rounded twice on its way to fp16 or fp32, first too coarsely.
    """
    if c.dtype == torch.bfloat16:
        return True
    version = torch.version.cuda
    has_cublas = version is not None and tuple(map(int, version.split(".")[:2])) >= (12, 9)
    return has_cublas and torch.cuda.get_device_capability(c.device) == (9, 0)


def _multiply_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Return the product of operands with scales of blocks, of which cuBLAS reads columns, B's of a multiple of 4."""
    blocks = len(b_scale)
    padded = F.pad(b_scale, (0, 0, 0, -blocks % 4))
    kinds = F.ScalingType
    return F.scaled_mm(
        a,
        b,
        a_scale.t().contiguous().t(),
        kinds.BlockWise1x128,
        padded.t().contiguous().t(),
        kinds.BlockWise128x128,
        output_dtype=dtype,
        use_fast_accum=use_fast_accum,
    )
