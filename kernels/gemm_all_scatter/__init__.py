"""GEMM + all-scatter: A (m, k) replicated, B (k, n/W) a block of columns a rank, C (m, n) whole on every rank."""

from __future__ import annotations

import torch

from iris_core import Context
from overlap_taxonomy import get_variant, register

from ..common.config import GemmConfig
from ..common.operator import Operator
from . import bulk_synchronous, copy_engine, fused_sequential, library, producer_consumer, workgroup_specialized
from .operator import FAMILY
from .problem import GemmAllScatterProblem
from .reference import reference

Problem = GemmAllScatterProblem

for _variant in (
    *library.VARIANTS,
    bulk_synchronous.VARIANT,
    producer_consumer.VARIANT,
    fused_sequential.VARIANT,
    workgroup_specialized.VARIANT,
    copy_engine.VARIANT,
):
    register(_variant)


def gemm_all_scatter(
    ctx: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    variant: str = "fused_sequential",
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Return A @ B, whole on every rank, from A on every rank and a block of B's columns on each.

    The first call with a set of shapes makes an operator and keeps it with the context; that is collective, so all
    ranks must make the same calls. The output is the operator's and is overwritten by the next call with the same
    shapes: read it, in stream order, before.

    Args:
        ctx: the context.
        a: (m, k), the same on every rank; bf16, fp16 or fp32, on the context's device.
        b: (k, this rank's columns); the blocks are those of ``torch.chunk`` over the n columns of all ranks.
        variant: the overlap pattern.
        config: tunables; None for the defaults.

    Returns:
        C (m, n), of a's dtype, on the heap.

    Raises:
        ValueError: operands that do not fit each other or the other ranks', an unknown variant, or what the variant
            cannot do.
        HeapExhausted: the heap has no room for C.
    """
    key = (FAMILY, variant, tuple(a.shape), tuple(b.shape), a.dtype, config)
    operator = ctx.operators.get(key)
    if operator is None:
        operator = ctx.operators[key] = make_operator(ctx, a, b, variant=variant, config=config)
    return operator(a, b)


def make_operator(
    ctx: Context, a: torch.Tensor, b: torch.Tensor, *, variant: str, config: GemmConfig | None = None
) -> Operator[GemmAllScatterProblem]:
    """Return an operator for these operands; collective. Arguments and errors as `gemm_all_scatter`."""
    with ctx.group.together(f"make {FAMILY}/{variant}"):
        found = get_variant(FAMILY, variant)
        for name, tensor in (("A", a), ("B", b)):
            if tensor.ndim != 2:
                raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be a matrix")
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"A is {tuple(a.shape)} and B is {tuple(b.shape)}; A's columns must be B's rows")
    ctx.agree("A's shape, A's dtype and B's rows", [list(a.shape), str(a.dtype), b.shape[0]])
    columns = ctx.group.all_gather(b.shape[1])
    problem = GemmAllScatterProblem(a.shape[0], sum(columns), a.shape[1], ctx.get_num_ranks(), a.dtype)
    expected = [problem.b_shape(rank)[1] for rank in range(problem.world_size)]
    if columns != expected:
        raise ValueError(
            f"the ranks' blocks of B have {columns} columns; {problem.n} columns over {problem.world_size} ranks are "
            f"{expected}, as torch.chunk cuts them"
        )
    return found.build(ctx, problem, config)


__all__ = ["FAMILY", "Problem", "gemm_all_scatter", "make_operator", "reference"]
