"""A rank's product by torch: cuBLAS's, or hipBLASLt's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .config import is_fp8
from .device.epilogue import finish_with_torch
from .fp8.scaled_mm import multiply_scaled
from .problem import Problem


def product_for(dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A @ B for a C of this dtype, not of fp8: rounded to it at once, or, where it is not A's, in fp32."""
    if dtype == a.dtype or a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def multiply_with_torch(
    problem: Problem,
    operands: Mapping[str, torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    is_partial: bool = False,
    a_scale: torch.Tensor | None = None,
) -> None:
    """Make A @ B in C, which may have another dtype, and finish it unless it is a partial sum.

    Args:
        problem: says how; its rows mean nothing.
        operands: scales, and what the epilogue reads, by name.
        a, b, c: matrices.
        is_partial: whether the epilogue comes later.
        a_scale: A's, where that is not among the operands.
    """
    can_be_product = is_partial or problem.narrowing == 1
    if is_fp8(a.dtype):
        is_product = can_be_product
        product = c if can_be_product else c.new_empty(len(a), b.shape[1])
        kinds = problem.scales
        if a_scale is None:
            a_scale = operands.get("a_scale")
        elif kinds[0] == "tensor":
            kinds = ("row", kinds[1])
        b_scale = operands.get("b_scale")
        multiply_scaled(a, b, product, kinds, a_scale, b_scale, use_fast_accum=problem.use_fast_accum)
    else:
        is_product = c.dtype == a.dtype and can_be_product
        product = torch.mm(a, b, out=c) if is_product else product_for(c.dtype, a, b)
    epilogue = () if is_partial else problem.epilogue
    if epilogue or not is_product:
        c.copy_(finish_with_torch(product, epilogue, operands))
