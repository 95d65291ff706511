"""What autograd sees of a layer: a product with its collective, and the gradients, each with the opposite collective.

| forwards | backwards |
|---|---|
| all-gather and GEMM | GEMM and reduce-scatter |
| GEMM, or GEMM and all-scatter | GEMM and all-reduce |
| GEMM and reduce-scatter | all-gather and GEMM |
| GEMM and all-reduce | GEMM |

In fp8 (float8.py) both products of x and of the output's gradient by the weight are of quantised operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from iris_kernels.common.operators.product import in_graph

from .float8 import Formats, Scaled, stacked, stacked_scale
from .own_products import linear


class Step(NamedTuple):
    """A product of one of the families, for any number of tokens.

    Args:
        family: its name.
        n, k: columns of the second operand and rows of it, of the whole product.
        variant: the overlap pattern.
        keep_gathered: whether the family's gathered operand is returned, too.
        activation: what is applied to the output; None for nothing.
        norm_eps: of an RMSNorm of the output's rows, which are returned, too; None for none.
        use_fast_accum: as `Float8`'s.
    """

    family: str
    n: int
    k: int
    variant: str
    keep_gathered: bool = False
    activation: str | None = None
    norm_eps: float | None = None
    use_fast_accum: bool = False


class Multiplies(Protocol):
    """What makes a step; see `Sharding.multiply`."""

    def multiply(
        self,
        step: Step,
        a: torch.Tensor,
        b: tuple[torch.Tensor, ...],
        m: int,
        *,
        out_dtype: torch.dtype,
        **read: torch.Tensor | None,
    ) -> Any:
        """Return the step's output, then the gathered operand if it is kept, or the normed rows; the caller's memory.

        `read`: the scales of fp8 operands, a_scale and b_scale, what is added to the output, bias and residual, and the
        norm's weight, norm_weight.
        """


class Steps(NamedTuple):
    """What a layer's call multiplies; None where nothing is communicated.

    Args:
        forward: multiplies the layer's input by its weight.
        backward: multiplies the output's gradient by the weight.
        keeps_input: whether the weight's gradient will be asked for.
        own: this rank's columns, where the output has all of them.
        formats: in which operands are quantised; None where they are not.
        use_fast_accum: as `Float8`'s, of a forward pass without a step.
    """

    forward: Step | None
    backward: Step | None
    keeps_input: bool
    own: slice | None = None
    formats: Formats | None = None
    use_fast_accum: bool = False

    def scaled(self, matrix: torch.Tensor, scale: torch.Tensor | None = None) -> Scaled:
        """Return x or a weight as the forward pass multiplies it, by its own scales or a given one."""
        return Scaled.of(matrix, self.formats and self.formats.forward, scale)

    def scaled_back(self, grad: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[Scaled, tuple[Scaled, ...]]:
        """Return the output's gradient, and the weights' transposes, as the backward pass multiplies them."""
        if self.formats is None:
            return Scaled(grad), tuple([Scaled(weight.t()) for weight in weights])
        weight = Scaled.of(stacked(weights).t(), self.formats.forward)
        return Scaled.of(grad, self.formats.gradient), (weight,)


def multiply_columns(
    sharding: Multiplies,
    steps: Steps,
    m: int,
    x: Scaled,
    weights: Sequence[Scaled],
    biases: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, Scaled]:
    """Return x @ weight.t() + bias of this rank's columns, or of all of them, and the x of all ranks.

    Several weights, or biases, are taken as one, one above the other.

    Args:
        sharding: makes the steps.
        steps: what to multiply.
        m: tokens of all ranks.
        x: (tokens, k), of all ranks or of this one; see `Steps.forward`.
        weights: (this rank's columns, k), together.
        biases: (this rank's columns,), together; or none.
        out_dtype: of the product.
    """
    if steps.forward is None:
        return linear(x, weights, biases, out_dtype, use_fast_accum=steps.use_fast_accum), x
    bias = stacked(biases) if len(biases) > 0 else None
    product, *gathered = _multiplied(sharding, steps.forward, m, x, weights, out_dtype, bias=bias)
    if in_graph():  # which may end before this is split: of two outputs that alias one another one must be a view
        product = product.view_as(product)
    return product, Scaled(*gathered) if gathered else x


def multiply_rows(
    sharding: Multiplies,
    steps: Steps,
    m: int,
    x: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
) -> Sequence[torch.Tensor]:
    """Return the sum over ranks of x @ weight.t(), plus bias and residual: all of its rows, or this rank's.

    Behind it those rows normed, if the step norms them.

    Args:
        sharding, steps, m, out_dtype: as in `multiply_columns`.
        x: (tokens of all ranks, this rank's shard of k).
        weight: (n, this rank's shard of k).
        bias: (n,), or None.
        residual: of the output's rows, (rows, n), or None.
        norm_weight: (n,), or None.
    """
    assert steps.forward is not None
    read = {"bias": bias, "residual": residual, "norm_weight": norm_weight}
    return _multiplied(sharding, steps.forward, m, x, (weight,), out_dtype, **read)


def _multiplied(
    sharding: Multiplies,
    step: Step,
    m: int,
    x: Scaled,
    weights: Sequence[Scaled],
    out_dtype: torch.dtype,
    **read: torch.Tensor | None,
) -> Any:
    """Return what a step gives of x and the transposes of weights."""
    read |= {"a_scale": x.scale, "b_scale": stacked_scale(weights)}
    return sharding.multiply(step, x.matrix, tuple([one.matrix.t() for one in weights]), m, out_dtype=out_dtype, **read)


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
        scaled = [steps.scaled(weight) for weight in weights]
        product, whole = multiply_columns(sharding, steps, m, steps.scaled(x), scaled, biases, x.dtype)
        ctx.save_for_backward(*(whole if steps.keeps_input else (None, None)), *weights)
        ctx.m, ctx.sharding, ctx.steps = m, sharding, steps
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), (whole, scale, *weights) = grads, ctx.saved_tensors
        steps = ctx.steps
        own = grad if steps.own is None else grad[:, steps.own]
        of_x = None
        if ctx.needs_input_grad[0]:
            scaled, transposed = steps.scaled_back(own, weights)
            of_x = _multiplied(ctx.sharding, steps.backward, ctx.m, scaled, transposed, grad.dtype)[0]
        wanted, widths = ctx.needs_input_grad[5:], [len(weight) for weight in weights]
        of_weights, of_biases = wanted[: len(weights)], wanted[len(weights) :]
        x = Scaled(whole, _only_backwards(scale, own)).dequantised(grad.dtype) if any(of_weights) else None
        parts = zip(own.split(widths, 1), of_weights, strict=True)
        found = [part.t() @ x if is_wanted else None for part, is_wanted in parts]
        if of_biases:
            columns = zip(own.split(widths, 1), of_biases, strict=True)
            found += [part.sum(0) if is_wanted else None for part, is_wanted in columns]
        return of_x, None, None, None, None, *found


def _only_backwards(scale: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor | None:
    """Return a scale as it is; in a graph as what is not known before a gradient is.

    Else AOTAutograd (torch 2.13) has the forward pass multiply by it, and keeps the product, twice fp8's bytes.
    """
    return scale if scale is None or not in_graph() else torch.where(grad[:, :1].isnan(), scale, scale)


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
        scaled = steps.scaled(x)
        ctx.save_for_backward(*(scaled if steps.keeps_input else (None, None)), weight)
        ctx.m, ctx.sharding, ctx.steps = m, sharding, steps
        return multiply_rows(sharding, steps, m, scaled, steps.scaled(weight), bias, x.dtype, residual)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (whole,), (x, scale, weight) = grads, ctx.saved_tensors
        of_residual, dtype, steps = whole if ctx.needs_input_grad[3] else None, whole.dtype, ctx.steps
        of_x = None
        if steps.backward is not None and any(ctx.needs_input_grad[:3]):  # the ranks have a part of the rows each
            scaled, transposed = steps.scaled_back(whole, (weight,))
            of_x, *gathered = _multiplied(ctx.sharding, steps.backward, ctx.m, scaled, transposed, dtype)
            whole = Scaled(*gathered).dequantised(dtype) if gathered else whole
        elif ctx.needs_input_grad[0]:
            scaled, transposed = steps.scaled_back(whole, (weight,))
            of_x = linear(scaled, transposed, (), dtype)
        of_weight = whole.t() @ Scaled(x, scale).dequantised(dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, whole.sum(0) if ctx.needs_input_grad[2] else None, of_residual, None, None, None
