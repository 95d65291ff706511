"""All-gather + GEMM: A (m/W, k) and B (k, n/W) a shard per rank, C (m, n/W) this rank's columns."""

from __future__ import annotations

from typing import Any

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
from .hopper import copy_engine as hopper_copy_engine
from .hopper import workgroup_specialized as hopper_workgroup_specialized
from .host import FAMILY
from .portable import (
    bulk_synchronous,
    copy_engine,
    fused_sequential_stream_k,
    producer_consumer,
    workgroup_specialized,
)
from .problem import AllGatherGemmProblem, gradients

Problem = AllGatherGemmProblem

define_op(FAMILY, Problem, gradients, dim=1, gathers=True)

_PATTERNS = (
    bulk_synchronous,
    producer_consumer,
    workgroup_specialized,
    copy_engine,
    hopper_workgroup_specialized,
    hopper_copy_engine,
    fused_sequential_stream_k,
)
for _variant in (
    library.VARIANT,
    variant_of(bulk_synchronous.LIBRARY_VARIANT),
    variant_of(copy_engine.LIBRARY_VARIANT),
    *[variant_of(one.VARIANT) for one in _PATTERNS],
    auto_variant(FAMILY),
):
    register(_variant)
register_hierarchy(FAMILY, HIERARCHY)


def all_gather_gemm(
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
    quantize: str | None = None,
    variant: str = "auto",
    config: GemmConfig | None = None,
    m: int | None = None,
    n: int | None = None,
    return_gathered: bool = False,
) -> Any:
    """Return this rank's columns of A @ B, from a shard of A's rows and a block of B's columns on each rank.

    The first call makes an operator and keeps it with the context, and one with more rows of A has it make room; both
    are collective, so all ranks must make the same calls. C is the caller's; the gathered A is overwritten by the next
    call of the same n and k: read it, in stream order, before. Where an operand requires a gradient, and in a graph of
    `torch.compile`, this is ``torch.ops.iris_overlap.all_gather_gemm``, and both are the caller's.

    Args:
        ctx: the context.
        a: (this rank's rows, k); the shards are those of ``torch.chunk`` over the m rows of all ranks. bf16, fp16,
            fp32 or fp8, on the context's device.
        b: (k, this rank's columns), likewise cut by columns.
        a_scale, b_scale: fp32 scales of fp8 operands, which stand for a_scale · a and b_scale · b. Of a's tensor () or
            rows (a's rows, 1), with those of b's tensor () or columns (1, b's columns); or both of blocks of 128 of k,
            (a's rows, k / 128), and of columns, too, (k / 128, b's columns / 128), rounded up. Those of a are
            gathered with its rows.
        scale: multiplies the product: a number (), or (this rank's columns,), one a column. Has no gradient.
        bias: added then: (this rank's columns,).
        residual: added then: (m, this rank's columns); of any strides.
        activation: applied then, to fp32: "relu", "gelu", "gelu_tanh" or "silu"; or "swiglu", silu(gate) · up, of gates
            in the even and ups in the odd columns of b, for half as many columns of C. Where a gradient is required
            torch applies it, in a pass of its own. Scale, bias and residual are of a's dtype,
            or of `out_dtype` where that is fp8; None for none of either.
        out_dtype: C's; None for a's, or bf16 where that is fp8.
        use_fast_accum: leave sums of fp8 products in the tensor cores' accumulators of sm_90, as the argument of this
            name of ``torch._scaled_mm`` does; they are promoted to fp32 every 128 of k otherwise.
        quantize: "row" to quantise a bf16, fp16 or fp32 a as it is gathered, for an fp8 b with a `b_scale` of its
            tensor or columns. Each rank makes e4m3 of its rows (e4m3fnuz for a b of fnuz kinds), with a scale per row,
            by which the row's largest element becomes the format's largest number; these travel, half of bf16's bytes.
            A row that holds an inf or a NaN gives NaN. There is no gradient of a. None for a as it is.
        variant: the overlap pattern, or one implementation of it by its full name, e.g. "copy_engine:portable"; "auto"
            takes the fastest for the problem.
        config: tunables of a variant that is named; None for the defaults.
        m, n: rows of A and columns of B of all ranks together. Needed where ranks hold as many of another m or n: by
            its own 3 of 9 a rank on four cannot tell that there are now 10.
        return_gathered: return all of A too, as training needs.

    Returns:
        C (m, this rank's columns), of `out_dtype`; with `return_gathered` also A (m, k), and its scales if it has
        any, of rows (m, 1) or of blocks; with `quantize` that is A in fp8, and the scales of its rows. Rows of C and
        of A may lie further apart than they are long.

    Raises:
        ValueError: operands that do not fit each other or the other ranks', an unknown variant, or what the variant
            cannot do.
        HeapExhausted: the heap has no room for the gathered A.
    """
    outputs = call(
        FAMILY,
        ctx,
        a,
        b,
        sizes={"m": m, "n": n},
        operands={"bias": bias, "residual": residual, "scale": scale, "a_scale": a_scale, "b_scale": b_scale},
        activation=activation,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        quantize=quantize,
        variant=variant,
        config=config,
        keep_gathered=return_gathered,
    )
    return tuple(outputs) if return_gathered else outputs[0]


__all__ = ["FAMILY", "Problem", "all_gather_gemm", "reference"]
