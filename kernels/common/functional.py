"""Operators on demand: from operands alone, made at the first call with their shapes and kept with the context."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from iris_core import Context, HeapExhausted
from overlap_taxonomy import get_variant

from .config import GemmConfig
from .operator import Operator
from .problem import Problem


def operator_for(ctx: Context, a: torch.Tensor, b: torch.Tensor, **asked: Any) -> Operator[Any]:
    """Return the context's operator for these operands; the first time, make it, which is collective.

    A graph of `torch.compile` ends before this, and the next begins with the operator's call.

    Args:
        ctx, a, b: the context, and this rank's operands.
        asked: what else `_find_or_make` takes.

    Raises:
        ValueError: no context, operands that do not fit each other, the other ranks' or `sizes`, an unknown variant, or
            what it cannot do.
        HeapExhausted: the heap has no room for the operator's buffers.
    """
    find = torch.compiler.disable(_find_or_make) if torch.compiler.is_dynamo_compiling() else _find_or_make
    return find(ctx, a, b, **asked)


def _find_or_make(
    ctx: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    family: str,
    variant: str,
    problem_type: type[Problem],
    config: GemmConfig | None = None,
    sizes: dict[str, int | None],
    accumulation_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Operator[Any]:
    """See `operator_for`.

    Args:
        sizes: of the whole problem, those that the family cuts, by name; None where the caller gives none. A rank
            cannot tell 9 rows of all ranks from 10 by its own 3: without them, it takes the operator that it has for
            its shapes.
    """
    if not isinstance(ctx, Context):
        raise ValueError(f"ctx is a {type(ctx).__name__}; it must be an iris_core.Context, as iris_core.iris() returns")
    for name, tensor in (("A", a), ("B", b)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if not (config is None or isinstance(config, GemmConfig)):
        raise ValueError(f"config is a {type(config).__name__}; it must be a GemmConfig, or None for the defaults")
    asked = (config, accumulation_dtype, *sizes.values(), *sorted(options.items()))
    key = (family, variant, tuple(a.shape), tuple(b.shape), a.dtype, asked)
    if ctx.debug_mode:
        ctx.agree("the calls, and whether the ranks make an operator for them", [family, variant, key in ctx.operators])

    def make() -> Operator[Any]:
        with ctx.collective_section(f"make {family}/{variant}"):
            build = get_variant(family, variant).build
            _check_matrices(a, b)
            if accumulation_dtype != torch.float32:
                raise ValueError(
                    f"accumulation_dtype is {accumulation_dtype}; partial sums are accumulated in {torch.float32} alone"
                )
        return build(ctx, _problem(ctx, a, b, problem_type, sizes), config, **options)

    return keep(ctx, key, make)


def keep(ctx: Context, key: Hashable, make: Callable[[], Operator[Any]]) -> Operator[Any]:
    """Return the operator that a context keeps under a key; make it where there is none, which is collective.

    Raises:
        HeapExhausted: the heap has no room for it; says how many others there are.
    """
    if key not in ctx.operators:
        try:
            ctx.operators[key] = make()
        except HeapExhausted as error:
            raise HeapExhausted(
                f"{error}; {len(ctx.operators)} operators are kept for calls with other shapes: "
                "ctx.release_operators() gives their memory back"
            ) from error
    return ctx.operators[key]


def _check_matrices(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor in (("A", a), ("B", b)):
        if tensor.ndim != 2:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be a matrix")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"A is {tuple(a.shape)} and B is {tuple(b.shape)}; A's columns must be B's rows")


def _problem(
    ctx: Context, a: torch.Tensor, b: torch.Tensor, problem_type: type[Problem], sizes: dict[str, int | None]
) -> Problem:
    ctx.agree("A's dtype", str(a.dtype))
    ctx.agree("the sizes of the whole that the ranks give", sizes)
    with ctx.recovery.raising_root_cause():
        shapes = ctx.control_plane.all_gather([list(a.shape), list(b.shape)], "compare shapes")
    a_shapes, b_shapes = [shape for shape, _ in shapes], [shape for _, shape in shapes]
    problem = problem_type.from_shapes(a_shapes, b_shapes, a.dtype)
    for name, given, expected_of in (("A", a_shapes, problem.a_shape), ("B", b_shapes, problem.b_shape)):
        expected = [list(expected_of(rank)) for rank in range(problem.world_size)]
        if given != expected:
            raise ValueError(
                f"the ranks' {name} are {given}; for M={problem.m}, N={problem.n}, K={problem.k} over "
                f"{problem.world_size} ranks they must be {expected}, as torch.chunk cuts them"
            )
    for name, size in sizes.items():
        if size is not None and size != getattr(problem, name):
            raise ValueError(f"{name} is {size}; the ranks' operands make {getattr(problem, name)}")
    return problem
