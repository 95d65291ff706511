"""What autograd sees of a layer: a product with its collective, and the gradients, each with the opposite collective.

| forwards | backwards |
|---|---|
| all-gather and GEMM | GEMM and reduce-scatter |
| GEMM, or GEMM and all-scatter | GEMM and all-reduce |
| GEMM and reduce-scatter | all-gather and GEMM |
| GEMM and all-reduce | GEMM |

An operator owns its output and overwrites it at its next call, so whatever outlives a step here is copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from iris_kernels.common.operator import Operator


class Steps(NamedTuple):
    """The operators of one layer's call, for one number of tokens; None where nothing is communicated.

    Args:
        forward: multiplies the layer's input by its weight.
        backward: multiplies the output's gradient by the weight.
        keeps_input: whether the weight's gradient will be asked for.
        copy_output: whether the output is the caller's, and not the operator's.
    """

    forward: Operator[Any] | None
    backward: Operator[Any] | None
    keeps_input: bool
    copy_output: bool

    def is_closed(self) -> bool:
        """Whether an operator's memory was given back."""
        return any(operator is not None and operator.is_closed for operator in self[:2])


def multiply_columns(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: Steps
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x @ weight.t() + bias of this rank's columns, or of all of them, and the x of all ranks.

    Args:
        x: (tokens, k), of all ranks or of this one; see `Steps.forward`.
        weight: (this rank's columns, k).
        bias: of as many elements as the output has columns, or None.
        steps: what to call.
    """
    if steps.forward is None:
        return F.linear(x, weight, bias), x
    output, *gathered = steps.forward.call(x, weight.t())
    product = _owned(steps.forward, steps.forward.as_matrix(output), bias, copy=steps.copy_output)
    return product, _owned(steps.forward, gathered[0]) if gathered else x


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: Steps) -> torch.Tensor:
    """Return the sum over ranks of x @ weight.t(), plus bias: all of its rows, or this rank's.

    Args:
        x: (tokens of all ranks, this rank's shard of k).
        weight: (n, this rank's shard of k).
        bias: (n,), or None.
        steps: what to call.
    """
    assert steps.forward is not None
    return _owned(steps.forward, steps.forward(x, weight.t()), bias, copy=steps.copy_output)


class Columns(torch.autograd.Function):
    """`multiply_columns` with gradients; `own` names this rank's columns, where the output has all of them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: Steps, own: slice | None
    ) -> torch.Tensor:
        product, whole = multiply_columns(x, weight, bias, steps)
        ctx.save_for_backward(whole if steps.keeps_input else None, weight)
        ctx.backward_operator, ctx.own = steps.backward, own
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), (whole, weight), operator = grads, ctx.saved_tensors, ctx.backward_operator
        own = grad if ctx.own is None else grad[:, ctx.own]
        of_x = _owned(operator, operator(own, weight)) if ctx.needs_input_grad[0] else None
        of_weight = own.t() @ whole if ctx.needs_input_grad[1] else None
        return of_x, of_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None


class Rows(torch.autograd.Function):
    """`multiply_rows` with gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: Steps
    ) -> torch.Tensor:
        ctx.save_for_backward(x if steps.keeps_input else None, weight)
        ctx.backward_operator = steps.backward
        return multiply_rows(x, weight, bias, steps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (whole,), (x, weight), operator = grads, ctx.saved_tensors, ctx.backward_operator
        of_x = None
        if operator is not None:  # the ranks have a part of the rows each
            of_x, *gathered = operator.call(whole, weight)
            of_x, whole = _owned(operator, of_x), gathered[0] if gathered else whole
        elif ctx.needs_input_grad[0]:
            of_x = whole @ weight
        of_weight = whole.t() @ x if ctx.needs_input_grad[1] else None
        return of_x, of_weight, whole.sum(0) if ctx.needs_input_grad[2] else None, None


def _owned(
    operator: Operator[Any], output: torch.Tensor, bias: torch.Tensor | None = None, *, copy: bool = True
) -> torch.Tensor:
    """Return what an operator gave, plus `bias`, in memory that its next call does not overwrite.

    Without `copy` and bias it is the operator's own.
    """
    if bias is not None:
        return output + bias
    if not copy or torch.compiler.is_dynamo_compiling() or not operator.keeps_outputs:  # there it is a copy, or new
        return output
    return output.clone(memory_format=torch.contiguous_format)
