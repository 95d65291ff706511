"""GEMM + reduce-scatter: A (m, k/W) and B (k/W, n) a slice of k a rank, C (m/W, n) this rank's rows of the sum."""

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
from .problem import GemmReduceScatterProblem, gradients

Problem = GemmReduceScatterProblem

define_op(FAMILY, Problem, gradients, dim=0)

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
    library.VARIANT,
    variant_of(bulk_synchronous.LIBRARY_VARIANT),
    *[variant_of(one.VARIANT) for one in _PATTERNS],
    auto_variant(FAMILY),
):
    register(_variant)
register_hierarchy(FAMILY, HIERARCHY)


def gemm_reduce_scatter(
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
    partial_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    variant: str = "auto",
    config: GemmConfig | None = None,
    k: int | None = None,
    accumulation_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks of A @ B, from a slice of the inner dimension on each rank.

    Partial sums are added in fp32 in a fixed order, so the bits are the same every time; `library`, which `auto` may
    take, adds as NCCL does. The first call makes an operator and keeps it with the context, and one with more rows of A
    has it make room; both are collective, so all ranks must make the same calls. C is the caller's. Where an operand
    requires a gradient, and in a graph of `torch.compile`, this is ``torch.ops.iris_overlap.gemm_reduce_scatter``.

    Args:
        ctx: the context.
        a: (m, this rank's slice of k); the slices are those of ``torch.chunk`` over the k of all ranks. bf16, fp16,
            fp32 or fp8, on the context's device.
        b: (this rank's slice of k, n).
        a_scale, b_scale: fp32 scales of fp8 operands, which stand for a_scale · a and b_scale · b. Of a's tensor () or
            rows (a's rows, 1), with those of b's tensor () or columns (1, b's columns); or both of blocks of 128 of k,
            (a's rows, k / 128), and of columns, too, (k / 128, b's columns / 128), rounded up. Of this rank's own
            operands.
        scale: multiplies the sum: a number (), or (n,), one a column, the same on all ranks. Has no gradient.
        bias: added then: (n,), the same on all ranks.
        residual: added then: (this rank's rows of C, n); of any strides.
        activation: applied then, to fp32: "relu", "gelu", "gelu_tanh" or "silu". Where a gradient is required torch
            applies it, in a pass of its own. Scale, bias and residual are of a's dtype,
            or of `out_dtype` where that is fp8; None for none of either.
        out_dtype: C's; None for a's, or bf16 where that is fp8.
        partial_dtype: that of partial sums between ranks; None for C's. With another, sm90 kernels are not taken.
        use_fast_accum: leave sums of fp8 products in the tensor cores' accumulators of sm_90, as the argument of this
            name of ``torch._scaled_mm`` does; they are promoted to fp32 every 128 of k otherwise.
        variant: the overlap pattern, or one implementation of it by its full name, e.g. "copy_engine:portable"; "auto"
            takes the fastest for the problem.
        config: tunables of a variant that is named; None for the defaults.
        k: what all ranks' slices of k make together. Needed where ranks hold as many of another k: by its own 3 of 9 a
            rank on four cannot tell that there are now 10.
        accumulation_dtype: in what partial sums are accumulated; float32 is the only one.

    Returns:
        C (this rank's rows of m, as torch.chunk cuts them, n), of `out_dtype`. Its rows may lie further apart than they
        are long.

    Raises:
        ValueError: operands that do not fit each other or the other ranks', an unknown variant, or what the variant
            cannot do.
        HeapExhausted: the heap has no room for the peers' partial sums.
    """
    return call(
        FAMILY,
        ctx,
        a,
        b,
        sizes={"k": k},
        operands={"bias": bias, "residual": residual, "scale": scale, "a_scale": a_scale, "b_scale": b_scale},
        activation=activation,
        out_dtype=out_dtype,
        partial_dtype=partial_dtype,
        use_fast_accum=use_fast_accum,
        variant=variant,
        config=config,
        accumulation_dtype=accumulation_dtype,
    )[0]


def gemm_reduce_scatter_rms_norm(
    ctx: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    normed_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    variant: str = "auto",
    config: GemmConfig | None = None,
    k: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return this rank's rows of the sum over ranks of A @ B plus a residual, normed, and as they are.

    What a decoder block does behind its o_proj and down_proj: C is the residual of what comes next, the normed rows are
    what that reads. C is ``scale · A @ B + bias + residual``, rounded to `out_dtype`. Normed rows are
    ``C · rsqrt(mean(C²) + eps) · norm_weight``, computed in fp32 of the rounded C, as `torch.nn.functional.rms_norm`
    does, and rounded once. Variants for few rows norm them where they add the last partials, in the same kernel; behind
    others one more kernel is queued. Where an operand requires a gradient, torch norms C, in a pass of its own. Outputs
    are the caller's.

    Args:
        ctx, a, b, scale, bias, out_dtype, variant, config, k: as `gemm_reduce_scatter` takes them.
        norm_weight: (n,), of a's dtype, the same on all ranks.
        eps: added to the mean of squares.
        residual: (this rank's rows of C, n); of any strides. None for none.
        normed_dtype: torch.float8_e4m3fn, or torch.float8_e4m3fnuz on gfx942, for normed rows that are divided by a
            scale each; None for C's dtype.

    Returns:
        (normed rows, C), each (this rank's rows of m, n); with a `normed_dtype` (normed rows, C, scales), and the
        scales are fp32 (this rank's rows of m, 1): a row's largest magnitude over that dtype's largest number.

    Raises:
        ValueError: as `gemm_reduce_scatter`; or the GPU does not round to `normed_dtype`, which has no gradient.
        HeapExhausted: the heap has no room for partial sums.
    """
    c, normed, *scales = call(
        FAMILY,
        ctx,
        a,
        b,
        sizes={"k": k},
        operands={"bias": bias, "residual": residual, "scale": scale, "norm_weight": norm_weight},
        out_dtype=out_dtype,
        norm_eps=eps,
        normed_dtype=normed_dtype,
        variant=variant,
        config=config,
    )
    return normed, c, *scales


__all__ = ["FAMILY", "Problem", "gemm_reduce_scatter", "gemm_reduce_scatter_rms_norm", "reference"]
