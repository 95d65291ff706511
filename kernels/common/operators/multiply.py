"""What the families' ops run: the operator of a call is looked up, or made, and called; outputs are the caller's."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from iris_core.context import context_named

from ..fp8.scales import check_quantize, quantised_dtype
from ..problem import Problem
from .functional import find_or_make, scales_of
from .operator import Operator
from .parts import joined
from .product import Product, epilogue_of

_MOST_FOUND = 4096  # operators that are looked up at once


class Family(NamedTuple):
    """What is to be known of a family.

    Args:
        problem_type: its problems.
        gathers: whether it gathers A.
        dim: of B's, the one that the ranks share.
    """

    problem_type: type[Problem]
    gathers: bool
    dim: int


families: dict[str, Family] = {}  # that have an op
_found: weakref.WeakValueDictionary[Any, Operator[Any]] = weakref.WeakValueDictionary()  # by all that an op is asked


def multiply(
    family: str,
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    product: Product,
    operands: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """Return what an op gives, without gradients; memory of the caller's.

    That is C, then the gathered A if it is kept, or the normed rows, and their scales.

    Args:
        family, a, b, product: what is called.
        operands: what is read beside A and B, by name: bias, residual, scale, a_scale, b_scale, norm_weight.

    Raises:
        As `operator_for`, and as a call of an operator.
    """
    whole_b = joined(b, families[family].dim)
    operator = operator_of_call(family, a, whole_b, product, operands)
    read = as_operators_take(operands) if "b_scale" in operands else operands
    return owned(operator, operator.call(a, whole_b, m=product.m, **read))


def operator_of_call(
    family: str, a: torch.Tensor, b: torch.Tensor, product: Product, operands: Mapping[str, torch.Tensor]
) -> Operator[Any]:
    """Return the operator that `multiply` calls, with B as a whole; looked up, unless it must be made or grow."""
    reads = tuple(operands)
    scales: tuple[str, ...] = ()
    if product.quantize is not None or "a_scale" in operands or "b_scale" in operands:
        check_quantize(product.quantize, a.dtype, b.dtype, has_scale="a_scale" in operands)
        scales = scales_of(a, b, operands.get("a_scale"), operands.get("b_scale"), product.quantize)
    asked = (family, a.dtype, b.dtype, scales, reads, product)
    operator = _found.get(asked)
    if operator is None or operator.is_closed:
        operator = operator_for(family, a.dtype, product, reads=reads, b_dtype=b.dtype, scales=scales)
        if len(_found) >= _MOST_FOUND:
            _found.clear()
        _found[asked] = operator
    return operator


def operator_for(
    family: str,
    dtype: torch.dtype,
    product: Product,
    *,
    reads: tuple[str, ...] = (),
    b_dtype: torch.dtype | None = None,
    scales: tuple[str, ...] = (),
) -> Operator[Any]:
    """Return the operator of an op's calls; collective where it must be made, or make room for more rows.

    Args:
        family, dtype, product: what is called.
        reads: what calls have beside A and B, by name, but scales.
        b_dtype: B's; None for A's, `dtype`.
        scales: of what the operands have a scale each, as a `Problem`'s.

    Raises:
        RuntimeError: there is no such context.
        As `functional.operator_of`.
    """
    ctx = context_named(product.context)
    problem = _problem_of_row(family, product._replace(m=1), ctx.get_num_ranks(), dtype, reads, b_dtype, scales)
    options: dict[str, Any] = {"keep_gathered": product.keep_gathered} if families[family].gathers else {}
    return find_or_make(ctx, family, problem.with_rows(product.m), product.variant, None, options)


def problem_of(
    family: str,
    product: Product,
    world_size: int,
    dtype: torch.dtype,
    reads: tuple[str, ...],
    b_dtype: torch.dtype | None = None,
    scales: tuple[str, ...] = (),
) -> Problem:
    """Return what the ranks of a product do together."""
    if (product.norm_eps is None) == ("norm_weight" in reads):
        raise ValueError("norm_eps and norm_weight go together: give both, or neither")
    a_dtype, b_dtype = dtype, b_dtype or dtype
    if product.quantize:
        dtype = quantised_dtype(b_dtype)
    problem_type: Any = families[family].problem_type
    problem: Problem = problem_type(
        product.m,
        product.n,
        product.k,
        world_size,
        dtype,
        epilogue_of(reads, product.activation),
        product.out_dtype,
        b_dtype,
        scales,
        product.partial_dtype,
        product.use_fast_accum,
        product.norm,
        a_dtype,
    )
    return problem


_problem_of_row = functools.lru_cache(_MOST_FOUND)(problem_of)  # for a number of rows that is no SymInt


def as_operators_take(operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return operands with the scale of a tensor as a matrix of one."""
    return {
        name: one.reshape(1, 1) if name in ("a_scale", "b_scale") and one.ndim < 2 else one
        for name, one in operands.items()
    }


def owned(operator: Operator[Any], outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return what a call gave as matrices that its operator's next call does not overwrite, rows one behind the other.

    C is copied only where peers write it, or its rows lie apart.
    """
    output, *others = outputs
    matrix = operator.as_matrix(output)
    is_new = not operator.keeps_outputs or matrix.data_ptr() != output.data_ptr()
    gathered_or_normed = map(_copied, others) if operator.keeps_gathered else others
    return [matrix.contiguous() if is_new else _copied(matrix), *gathered_or_normed]


def _copied(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.clone(memory_format=torch.contiguous_format)
