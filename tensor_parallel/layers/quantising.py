"""Whole layers in fp8: of weights that are quantised here, or that came quantised, such as from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from iris_core import Context
from iris_kernels.common.config import is_fp8

from ..sharding.float8 import Float8, Formats, quantised_weight

SCALES = ("weight_scale", "input_scale")  # parameters of a layer in fp8, the second where it has a static one


def is_multiplied_here(linear: nn.Linear) -> bool:
    """Whether a layer's own forward does what one in fp8 does: torchao's Float8Linear, and those of fp8 weights."""
    torchao: Any = sys.modules.get("torchao.float8.float8_linear")  # where it is not loaded, this is none of it
    if torchao is not None and isinstance(linear, torchao.Float8Linear):
        return True
    return is_fp8(linear.weight.dtype) and hasattr(linear, "weight_scale")


def quantised(linear: nn.Linear, how: Float8 | None, ctx: Context) -> nn.Linear:
    """Return a whole layer with its weight as `how` has it: in fp8 beside a `weight_scale`, or as it is.

    A weight that is fp8 already stands for ``weight_scale * weight``, of the layer's attribute; one of torchao's
    Float8Tensor for ``scale * qdata``. An `input_scale` of the layer is kept.

    Args:
        linear: the whole layer.
        how: None for no fp8.
        ctx: of the device that multiplies.

    Raises:
        ValueError: fp8 that `how` does not take, or that the device does not multiply; no scale, or one of blocks.
    """
    weight, kind = linear.weight, type(linear.weight).__name__
    data, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if data is None or scale is None:
        data, scale = weight, getattr(linear, "weight_scale", None)
    if how is None or how.training:
        if is_fp8(data.dtype):
            raise ValueError(
                f"a layer's weight is a {kind} of {data.dtype}, and quantize is {how}; fp8 weights take "
                "quantize=Float8(), without gradients"
            )
        return linear
    formats = Formats.of(ctx)
    if not is_fp8(data.dtype):
        data, scale = quantised_weight(data.detach(), how, formats.forward)
    elif data.dtype not in formats:
        raise ValueError(
            f"a layer's weight is {data.dtype}, and {ctx.get_arch()} multiplies {' and '.join(map(str, formats))}"
        )
    elif scale is None:
        raise ValueError(f"a layer's weight is {data.dtype}, and it has no weight_scale; fp8 takes one")
    whole = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta").train(linear.training)
    whole.weight = nn.Parameter(data, requires_grad=False)
    whole.bias = linear.bias
    scales = {"weight_scale": _scale_of_rows(scale, linear.out_features)}
    if (given := getattr(linear, "input_scale", None)) is not None:
        scales["input_scale"] = _scale_of_all(given)
    for name, one in scales.items():
        setattr(whole, name, nn.Parameter(one, requires_grad=False))
    return whole


def merged_scales(linears: Sequence[nn.Linear]) -> dict[str, torch.Tensor]:
    """Return the scales of layers in fp8 as those of one: of weights one above the other, of x the largest."""
    weights: list[Any] = [getattr(one, "weight_scale", None) for one in linears]
    inputs: list[Any] = [getattr(one, "input_scale", None) for one in linears]
    if weights[0] is None:
        return {}
    merged, largest = (
        {"weight_scale": scales_by_row(weights, [one.out_features for one in linears])},
        largest_of(inputs),
    )
    return merged if largest is None else {**merged, "input_scale": largest}


def scales_by_row(scales: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """Return the scales of weights of so many rows as that of all, one above the other, (rows, 1)."""
    return torch.cat([scale.expand(count, 1) for scale, count in zip(scales, rows, strict=True)])


def largest_of(scales: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the largest of layers' static scales of one x, with which nothing is cut off; None where one has none."""
    given = [scale.reshape(()) for scale in scales if scale is not None]
    if len(given) < len(scales):
        return None
    return given[0] if len(given) == 1 else torch.stack(given).amax()


def _scale_of_rows(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a weight's scale as layers have it, (rows, 1) or ()."""
    if scale.numel() == 1:
        return _scale_of_all(scale)
    if tuple(scale.shape) in ((rows,), (rows, 1)):
        return scale.detach().float().reshape(rows, 1)
    raise ValueError(
        f"a layer's weight_scale is {tuple(scale.shape)}; for {rows} output features it takes one for all, (), or "
        f"{(rows, 1)}"
    )


def _scale_of_all(scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() != 1:
        raise ValueError(f"a layer's input_scale is {tuple(scale.shape)}; it takes one for all, ()")
    return scale.detach().float().reshape(())
