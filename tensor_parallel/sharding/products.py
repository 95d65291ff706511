"""What autograd sees of a layer: a product with its collective, and the gradients, each with the opposite collective.

| forwards | backwards |
|---|---|
| all-gather and GEMM | GEMM and reduce-scatter |
| GEMM, or GEMM and all-scatter | GEMM and all-reduce |
| GEMM and reduce-scatter | all-gather and GEMM |
| GEMM and all-reduce | GEMM |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class Step(NamedTuple):
    """A product of one of the families, for any number of tokens.

    Args:
        family: its name.
        n, k: columns of the second operand and rows of it, of the whole product.
        variant: the overlap pattern.
        keep_gathered: whether the family's gathered operand is returned, too.
        activation: what is applied to the output; None for nothing.
        norm_eps: of an RMSNorm of the output's rows, which are returned, too; None for none.
    """

    family: str
    n: int
    k: int
    variant: str
    keep_gathered: bool = False
    activation: str | None = None
    norm_eps: float | None = None


class Multiplies(Protocol):
    """What makes a step; see `Sharding.multiply`."""

    def multiply(
        self, step: Step, a: torch.Tensor, b: tuple[torch.Tensor, ...], m: int, **read: torch.Tensor | None
    ) -> Any:
        """Return the step's output, then the gathered operand if it is kept, or the normed rows; the caller's memory.

        `read`: what is added to it, bias and residual, and the norm's weight, norm_weight.
        """


class Steps(NamedTuple):
    """What a layer's call multiplies; None where nothing is communicated.

    Args:
        forward: multiplies the layer's input by its weight.
        backward: multiplies the output's gradient by the weight.
        keeps_input: whether the weight's gradient will be asked for.
        own: this rank's columns, where the output has all of them.
    """

    forward: Step | None
    backward: Step | None
    keeps_input: bool
    own: slice | None = None


def multiply_columns(
    sharding: Multiplies,
    steps: Steps,
    m: int,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x @ weight.t() + bias of this rank's columns, or of all of them, and the x of all ranks.

    Several weights, or biases, are taken as one, one above the other.

    Args:
        sharding: makes the steps.
        steps: what to multiply.
        m: tokens of all ranks.
        x: (tokens, k), of all ranks or of this one; see `Steps.forward`.
        weights: (this rank's columns, k), together.
        biases: (this rank's columns,), together; or none.
    """
    bias = stacked(biases) if len(biases) > 0 else None
    if steps.forward is None:
        return F.linear(x, stacked(weights), bias), x
    product, *gathered = sharding.multiply(steps.forward, x, tuple([weight.t() for weight in weights]), m, bias=bias)
    return product, gathered[0] if gathered else x


def multiply_rows(
    sharding: Multiplies,
    steps: Steps,
    m: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
) -> Sequence[torch.Tensor]:
    """Return the sum over ranks of x @ weight.t(), plus bias and residual: all of its rows, or this rank's.

    Behind it those rows normed, if the step norms them.

    Args:
        sharding, steps, m: as in `multiply_columns`.
        x: (tokens of all ranks, this rank's shard of k).
        weight: (n, this rank's shard of k).
        bias: (n,), or None.
        residual: of the output's rows, (rows, n), or None.
        norm_weight: (n,), or None.
    """
    assert steps.forward is not None
    read = {"bias": bias, "residual": residual, "norm_weight": norm_weight}
    products: Sequence[torch.Tensor] = sharding.multiply(steps.forward, x, (weight.t(),), m, **read)
    return products


class Columns(torch.autograd.Function):
    """`multiply_columns` with gradients, by one weight or several, one above the other; `parameters` ends in biases."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        m: int,
        sharding: Multiplies,
        steps: Steps,
        count: int,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        weights, biases = parameters[:count], parameters[count:]
        product, whole = multiply_columns(sharding, steps, m, x, weights, biases)
        ctx.save_for_backward(whole if steps.keeps_input else None, *weights)
        ctx.m, ctx.sharding, ctx.step, ctx.own = m, sharding, steps.backward, steps.own
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), (whole, *weights) = grads, ctx.saved_tensors
        own = grad if ctx.own is None else grad[:, ctx.own]
        of_x = ctx.sharding.multiply(ctx.step, own, tuple(weights), ctx.m)[0] if ctx.needs_input_grad[0] else None
        wanted, widths = ctx.needs_input_grad[5:], [len(weight) for weight in weights]
        of_weights, of_biases = wanted[: len(weights)], wanted[len(weights) :]
        parts = zip(own.split(widths, 1), of_weights, strict=True)
        found = [part.t() @ whole if is_wanted else None for part, is_wanted in parts]
        if of_biases:
            columns = zip(own.split(widths, 1), of_biases, strict=True)
            found += [part.sum(0) if is_wanted else None for part, is_wanted in columns]
        return of_x, None, None, None, None, *found


def stacked(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return weights, or biases, as one, one above the other: a copy, unless it is one."""
    return parameters[0] if len(parameters) == 1 else torch.cat(list(parameters))


class Rows(torch.autograd.Function):
    """`multiply_rows` with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        m: int,
        sharding: Multiplies,
        steps: Steps,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if steps.keeps_input else None, weight)
        ctx.m, ctx.sharding, ctx.step = m, sharding, steps.backward
        return multiply_rows(sharding, steps, m, x, weight, bias, residual)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (whole,), (x, weight) = grads, ctx.saved_tensors
        of_residual = whole if ctx.needs_input_grad[3] else None
        of_x = None
        if ctx.step is not None and any(ctx.needs_input_grad[:3]):  # the ranks have a part of the rows each
            of_x, *gathered = ctx.sharding.multiply(ctx.step, whole, (weight,), ctx.m)
            whole = gathered[0] if gathered else whole
        elif ctx.needs_input_grad[0]:
            of_x = whole @ weight
        of_weight = whole.t() @ x if ctx.needs_input_grad[1] else None
        return of_x, of_weight, whole.sum(0) if ctx.needs_input_grad[2] else None, of_residual, None, None, None
