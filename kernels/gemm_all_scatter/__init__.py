"""GEMM + all-scatter: A (m, k) replicated, B (k, n/W) a block of columns a rank, C (m, n) whole on every rank."""

from __future__ import annotations

import torch

from iris_core import Context
from overlap_taxonomy import register

from ..common.choice.auto import auto_variant
from ..common.config import GemmConfig
from ..common.hierarchical.call import register_hierarchy
from ..common.operators.dispatch import call
from ..common.operators.torch_op import define_op
from ..common.problem import reference
from ..common.variants.entry import variant_of
from . import library
from .hierarchical import HIERARCHY
from .hopper import warp_specialized as hopper_warp_specialized
from .host import FAMILY
from .portable import (
    bulk_synchronous,
    copy_engine,
    fused_sequential,
    fused_sequential_stream_k,
    producer_consumer,
    workgroup_specialized,
)
from .problem import GemmAllScatterProblem, gradients, own_columns

Problem = GemmAllScatterProblem

define_op(FAMILY, Problem, gradients, dim=1, own_columns=own_columns)

_PATTERNS = (
    bulk_synchronous,
    producer_consumer,
    fused_sequential,
    workgroup_specialized,
    copy_engine,
    hopper_warp_specialized,
    fused_sequential_stream_k,
)
for _variant in (
    *library.VARIANTS,
    variant_of(bulk_synchronous.LIBRARY_VARIANT),
    *[variant_of(one.VARIANT) for one in _PATTERNS],
    auto_variant(FAMILY, baseline="library_layout"),
):  # C is one matrix, whichever is chosen
    register(_variant)
register_hierarchy(FAMILY, HIERARCHY)


def gemm_all_scatter(
    ctx: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    variant: str = "auto",
    config: GemmConfig | None = None,
    n: int | None = None,
) -> torch.Tensor:
    """Return A @ B, whole on every rank, from A on every rank and a block of B's columns on each.

    The first call makes an operator and keeps it with the context, and one with more rows of A has it make room; both
    are collective, so all ranks must make the same calls. C is on the heap and is overwritten by the next call of the
    same n and k: read it, in stream order, before. Where an operand requires a gradient, and in a graph of
    `torch.compile`, this is ``torch.ops.iris_overlap.gemm_all_scatter``, and C is the caller's.

    Args:
        ctx: the context.
        a: (m, k), the same on every rank; bf16, fp16, fp32 or fp8, on the context's device.
        b: (k, this rank's columns); the blocks are those of ``torch.chunk`` over the n columns of all ranks.
        a_scale, b_scale: fp32 scales of fp8 operands, which stand for a_scale · a and b_scale · b. Of a's tensor () or
            rows (a's rows, 1), with those of b's tensor () or columns (1, b's columns); or both of blocks of 128 of k,
            (a's rows, k / 128), and of columns, too, (k / 128, b's columns / 128), rounded up. Of this rank's own
            operands.
        scale: multiplies the product: a number (), or (this rank's columns,), one a column. Has no gradient.
        bias: added then: (this rank's columns,).
        residual: added then: (m, this rank's columns), a view of the whole as well; of any strides.
        activation: applied then, to fp32: "relu", "gelu", "gelu_tanh" or "silu". Where a gradient is required torch
            applies it, in a pass of its own. Scale, bias and residual are of a's dtype,
            or of `out_dtype` where that is fp8; None for none of either.
        out_dtype: C's; None for a's, or bf16 where that is fp8.
        use_fast_accum: leave sums of fp8 products in the tensor cores' accumulators of sm_90, as the argument of this
            name of ``torch._scaled_mm`` does; they are promoted to fp32 every 128 of k otherwise.
        variant: the overlap pattern, or one implementation of it by its full name, e.g. "copy_engine:portable"; "auto"
            takes the fastest for the problem.
        config: tunables of a variant that is named; None for the defaults.
        n: columns of all ranks together. Needed where ranks hold as many of another n: by its own 3 of 9 a
            rank on four cannot tell that there are now 10.

    Returns:
        C (m, n), of `out_dtype`, on the heap. Its rows may lie further apart than they are long. With
        "library" they are the ranks' blocks, as they come: (ranks, m, columns of rank 0).

    Raises:
        ValueError: operands that do not fit each other or the other ranks', an unknown variant, or what the variant
            cannot do.
        HeapExhausted: the heap has no room for C.
    """
    return call(
        FAMILY,
        ctx,
        a,
        b,
        sizes={"n": n},
        operands={"bias": bias, "residual": residual, "scale": scale, "a_scale": a_scale, "b_scale": b_scale},
        activation=activation,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        variant=variant,
        config=config,
    )[0]


__all__ = ["FAMILY", "Problem", "gemm_all_scatter", "reference"]
