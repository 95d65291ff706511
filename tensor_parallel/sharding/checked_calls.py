"""Calls of a layer that were checked once: their operators, by all that the checks see."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from iris_core import Context
from iris_kernels.common.operators.operator import Operator
from iris_kernels.common.operators.parts import joined
from iris_kernels.common.operators.product import Product, in_graph
from iris_kernels.common.operators.torch_op import operator_of_call, owned

_MOST_KINDS = 4096  # of calls whose operator a layer looks up


class CheckedCalls:
    """Which operator a kind of call takes: its sizes and dtypes.

    Args:
        ctx: the layer's context.
        are_kept: whether any are; of fp8 each call is checked.
    """

    def __init__(self, ctx: Context, *, are_kept: bool) -> None:
        self._ctx, self._are_kept = ctx, are_kept
        self._operators: weakref.WeakValueDictionary[Hashable, Operator[Any]] = weakref.WeakValueDictionary()

    def kind(self, *tensors: torch.Tensor | None, tokens: int | None = None) -> Hashable:
        """Return all that a layer's checks see of a call, and that decides its operator.

        None for calls that are checked each time: in graphs, with gradients or autocast, and in debug mode, too.
        """
        if in_graph() or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return None
        if not self._are_kept or self._ctx.debug_mode:
            return None
        kind: tuple[Any, ...] = (tokens,)
        for one in tensors:  # no comprehension: a frame, a call
            kind += (None,) if one is None else (one.shape, one.dtype)
        return kind

    def operator(self, kind: Hashable) -> Operator[Any] | None:
        """Return the operator that a call of this kind called before; None where it is to be found, and all checked."""
        operator = None if kind is None else self._operators.get(kind)
        return None if operator is None or operator.is_closed else operator

    def keep(
        self,
        kind: Hashable,
        family: str,
        a: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        product: Product,
        **read: torch.Tensor | None,
    ) -> None:
        """Have further calls of a kind call what this one called, a product of A and the transposes of weights."""
        if len(self._operators) >= _MOST_KINDS:
            self._operators.clear()
        self._operators[kind] = operator_of_call(family, a, weights[0].t(), product, _given(read))


def call_again(
    operator: Operator[Any], m: int, a: torch.Tensor, weights: tuple[torch.Tensor, ...], **read: torch.Tensor | None
) -> torch.Tensor:
    """Return the output of A and the transposes of weights by an operator of `CheckedCalls`."""
    b = weights[0].t() if len(weights) == 1 else joined([weight.t() for weight in weights], 1)
    return owned(operator, operator.call(a, b, m=m, **_given(read)))[0]


def _given(read: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in read.items() if one is not None}
