"""Products that nothing is communicated with: of x by one weight, or by several.

Weights that lie together (`parts`) are one GEMM. Others are one each, or in fp8 copied to be one. A graph cannot know
whether they lie together: there they are one op, which finds out when it runs. It is no collective, and has no
gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from iris_kernels.common.fp8.scales import dequantised
from iris_kernels.common.operators.parts import lie_together
from iris_kernels.common.operators.product import in_graph

from .float8 import Scaled, stacked, stacked_scale

_MULTIPLE = 16  # of which a rank's features must be where torch multiplies fp8, on a GPU
_LIBRARY = torch.library.Library("iris_overlap", "FRAGMENT")


def linear(
    x: Scaled,
    weights: Sequence[Scaled],
    biases: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    *,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return ``x @ weight.t() + bias`` by torch, of rows of x; of several weights and biases as of one.

    Raises:
        ValueError: fp8 of sizes that torch does not multiply on a GPU.
    """
    if x.scale is not None:
        _check_sizes([one.matrix for one in weights])
    is_op = in_graph() and len(weights) > 1
    if is_op:
        matrices, scales = [one.matrix for one in weights], [one.scale for one in weights if one.scale is not None]
        op = torch.ops.iris_overlap.linear_by_parts.default
        product = op(x.matrix, matrices, out_dtype, use_fast_accum, list(biases), x.scale, scales)
    else:
        product = _multiply_here(x, weights, biases, out_dtype, use_fast_accum)
    # Dynamo of torch 2.11 takes an autograd.Function's output that is an op's own, which has no derivative, such as
    # that of `torch._scaled_mm`, for one that needs no gradient: those of what comes before were zeros.
    return product.view_as(product) if is_op or (in_graph() and x.scale is not None) else product


def _check_sizes(weights: Sequence[torch.Tensor]) -> None:
    features, width = sum(len(one) for one in weights), weights[0].shape[1]
    if weights[0].is_cuda and (features % _MULTIPLE or width % _MULTIPLE):
        raise ValueError(
            f"a rank's weight is {(features, width)}, which torch multiplies in fp8 without communication; on a GPU "
            f"both sizes must be multiples of {_MULTIPLE}"
        )


def _multiply_here(
    x: Scaled,
    weights: Sequence[Scaled],
    biases: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    matrices = [one.matrix for one in weights]
    if x.scale is None and len(matrices) > 1 and not lie_together(matrices):
        return _beside_each_other(x.matrix, matrices, biases)
    bias = stacked(biases) if len(biases) > 0 else None
    if x.scale is None:
        return F.linear(x.matrix, stacked(matrices), bias)
    weight, a_scale, b_scale = stacked(matrices), x.scale, stacked_scale(weights)
    assert b_scale is not None
    if not weight.is_cuda:  # on a CPU torch 2.11 multiplies by scales of tensors alone
        wide = dequantised(x.matrix, a_scale) @ dequantised(weight.t(), b_scale)
        return (wide if bias is None else wide + bias).to(out_dtype)
    is_of_rows = a_scale.ndim == 2 or b_scale.ndim == 2
    if is_of_rows:
        a_scale = a_scale.expand(len(x.matrix), 1).contiguous()
        b_scale = b_scale.expand(1, len(weight)).contiguous()
    dtype = torch.bfloat16 if is_of_rows else out_dtype  # which torch gives with scales of rows on any GPU
    added = bias if dtype == out_dtype != torch.float32 else None  # and all that it adds a bias in
    product = torch._scaled_mm(
        x.matrix, weight.t(), a_scale, b_scale, added, out_dtype=dtype, use_fast_accum=use_fast_accum
    ).to(out_dtype)
    return product if bias is None or added is not None else product + bias


def _beside_each_other(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the products by each weight in one matrix; to copy weights that lie apart would take longer."""
    widths = [len(weight) for weight in weights]
    output = x.new_empty(len(x), sum(widths))
    for number, (part, weight) in enumerate(zip(output.split(widths, 1), weights, strict=True)):
        if biases:
            torch.addmm(biases[number], x, weight.t(), out=part)
        else:
            torch.mm(x, weight.t(), out=part)
    return output


def _linear_by_parts(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    biases: Sequence[torch.Tensor],
    x_scale: torch.Tensor | None,
    scales: Sequence[torch.Tensor],
) -> torch.Tensor:
    scaled = [Scaled(one, scale) for one, scale in itertools.zip_longest(weights, scales)]
    with torch.no_grad():
        return _multiply_here(Scaled(x, x_scale), scaled, biases, out_dtype, use_fast_accum)


def _fake(x: torch.Tensor, weights: Sequence[torch.Tensor], out_dtype: torch.dtype, *others: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], sum(len(one) for one in weights)), dtype=out_dtype)


_LIBRARY.define(
    "linear_by_parts(Tensor x, Tensor[] weights, ScalarType out_dtype, bool use_fast_accum, Tensor[] biases, "
    "Tensor? x_scale, Tensor[] scales) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_LIBRARY.impl("linear_by_parts", _linear_by_parts, "CompositeExplicitAutograd")
torch.library.register_fake("iris_overlap::linear_by_parts", _fake, lib=_LIBRARY)
