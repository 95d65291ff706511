"""Calls of a layer that were checked once: their operators, by all that the checks see but the number of tokens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from iris_core import Context
from iris_kernels.common.operators.dispatch import Operators
from iris_kernels.common.operators.product import Product, in_graph
from iris_kernels.common.operators.torch_op import operators_of_call

_MOST_KINDS = 256  # of calls whose operators a layer looks up


class CheckedCalls:
    """Which operators a kind of call takes: its features and dtypes, whatever the number of tokens.

    Args:
        ctx: the layer's context.
        are_kept: whether any are; of fp8 each call is checked.
    """

    def __init__(self, ctx: Context, *, are_kept: bool) -> None:
        self._ctx, self._are_kept = ctx, are_kept
        self._operators: dict[Hashable, Operators] = {}

    def kind(self, x: torch.Tensor, *parameters: torch.Tensor | None, is_added_to: bool = False) -> Hashable:
        """Return all that decides a call's operators, and that is checked of it, but what depends on the tokens.

        None for calls that are checked each time: in graphs, of fake tensors, with gradients or autocast, and in debug
        mode, too.

        Args:
            x, parameters: the call's.
            is_added_to: whether there is a residual, which is checked each time.
        """
        if in_graph() or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return None
        if not self._are_kept or self._ctx.debug_mode or isinstance(x, FakeTensor):
            return None
        kind: tuple[Any, ...] = (x.ndim, x.shape[-1:], x.dtype, is_added_to)
        for one in parameters:  # no comprehension: a frame, a call
            kind += (None,) if one is None else (one.shape, one.dtype)
        return kind

    def operators(self, kind: Hashable) -> Operators | None:
        """Return the operators of which a call of this kind called one before; None where all is to be checked."""
        return None if kind is None else self._operators.get(kind)

    def keep(
        self,
        kind: Hashable,
        family: str,
        a: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        product: Product,
        **read: torch.Tensor | None,
    ) -> None:
        """Have further calls of a kind call the operators of this one, a product of A and the transposes of weights."""
        if len(self._operators) >= _MOST_KINDS:
            self._operators.clear()
        operands = {name: one for name, one in read.items() if one is not None}
        self._operators[kind] = operators_of_call(family, a, weights[0].t(), product, operands)
