"""Linear layers of which each rank has a part, as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch

from iris_core import Context
from iris_kernels.common.operators.product import in_graph

from .sharding.linear import ColumnSharding, RowSharding

_MOST_SHARDINGS = 256  # that a context keeps for calls of functions


def column_parallel_linear(
    ctx: Context,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_features: int | None = None,
    tokens: int | None = None,
    weight_scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return ``x @ weight.t() + bias`` of this rank's output features, or of all of them; with gradients.

    The first call of a size makes the operators for it, the gradients' too, and keeps them with the context. That is
    collective, so all ranks must make the same calls, and ask for the same gradients.

    Args:
        ctx: the context.
        x: (…, in_features), of all tokens on every rank; with `sequence_parallel` of this rank's tokens.
        weight: (this rank's output features, in_features), as ``torch.chunk`` cuts `torch.nn.Linear`'s by its first
            dimension. bf16, fp16 or fp32, on the context's device, as x; fp8 with ``quantize=Float8()``.
        bias: (this rank's output features,), or None.
        out_features: of all ranks together; None where all ranks have as many.
        tokens: of all ranks together, if each has a part; None where all ranks have as many.
        weight_scale: of an fp8 weight, (this rank's output features, 1) or (), fp32; None for another weight.
        input_scale: by which x is quantised, () fp32; None for one a token, computed in the call.
        options: the others of `ColumnSharding`: sequence_parallel, gather_output, sequence_dim, variant,
            backward_variant, activation and quantize.

    Returns:
        (…, this rank's output features), of all tokens; with `gather_output` (…, out_features) on every rank.

    Raises:
        ValueError: tensors that do not fit the sizes or each other, or the other ranks', an unknown variant, or what it
            cannot do.
        HeapExhausted: the heap has no room for the operators' buffers.
    """
    features = weight.shape[0] * ctx.get_num_ranks() if out_features is None else out_features
    return _sharding(ColumnSharding, ctx, weight.shape[1], features, options)(
        x, weight, bias, tokens=tokens, weight_scale=weight_scale, input_scale=input_scale
    )


def row_parallel_linear(
    ctx: Context,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    in_features: int | None = None,
    weight_scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``x @ weight.t()``, summed over ranks, plus bias and residual: of all tokens, or of this rank's.

    With gradients, also of the residual and the norm's weight; then torch norms the output, in a pass of its own.

    The first call of a size makes operators, as in `column_parallel_linear`.

    Args:
        ctx: the context.
        x: (…, this rank's input features), of all tokens.
        weight: (out_features, this rank's input features), as ``torch.chunk`` cuts `torch.nn.Linear`'s by its second
            dimension. bf16, fp16 or fp32, on the context's device, as x; fp8 with ``quantize=Float8()``.
        bias: (out_features,), the same on all ranks; None for none.
        residual: added to the output, of its shape and of x's dtype; where all ranks have all tokens the same on all.
        norm_weight: (out_features,), of x's dtype, the same on all ranks: an RMSNorm of the output is returned, too.
            None for none.
        eps: added to that norm's mean of squares.
        in_features: of all ranks together; None where all ranks have as many.
        weight_scale: of an fp8 weight, (out_features, 1) or (), fp32; None for another weight.
        input_scale: as in `column_parallel_linear`.
        options: the others of `RowSharding`: sequence_parallel, sequence_dim, variant, backward_variant, activation,
            quantize.

    Returns:
        (…, out_features) on every rank; with `sequence_parallel` of this rank's tokens. With `norm_weight` two of them:
        the normed output, and the output, which is the next residual.

    Raises:
        ValueError: as of `column_parallel_linear`.
        HeapExhausted: the same.
    """
    features = weight.shape[1] * ctx.get_num_ranks() if in_features is None else in_features
    return _sharding(RowSharding, ctx, features, weight.shape[0], options)(
        x,
        weight,
        bias,
        residual=residual,
        norm_weight=norm_weight,
        eps=eps,
        weight_scale=weight_scale,
        input_scale=input_scale,
    )


def _sharding(kind: Any, ctx: Context, in_features: int, out_features: int, options: dict[str, Any]) -> Any:
    """Return a context's sharding of these sizes and options: to make one takes the host as long as a call."""
    if in_graph():
        return kind(ctx, in_features, out_features, **options)
    shardings = ctx.kept.setdefault(_sharding, {})
    asked = (kind, in_features, out_features, *options.items())
    found = shardings.get(asked)
    if found is None:
        found = kind(ctx, in_features, out_features, **options)
        found.check_variants()
        if len(shardings) >= _MOST_SHARDINGS:
            shardings.clear()
        shardings[asked] = found
    return found
