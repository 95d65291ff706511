"""fp8 in layers: the option that asks for it, and matrices over scales.

| operand | format | a scale for each |
|---|---|---|
| x | e4m3 | row (a token), in each call; or a given one for all |
| weight, forwards | e4m3 | output feature, or one for all |
| gradient of the output | e5m2 | row (a token) |
| weight, backwards | e4m3 | input feature |

A weight's gradient is a product of x, or of the gathered x, as it was quantised, and of the output's gradient, both in
the layer's wider dtype: no family has that product, and nothing is communicated for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from iris_core import Context
from iris_kernels.common.config import fp8_formats, is_fp8
from iris_kernels.common.fp8.quantise import quantise_rows
from iris_kernels.common.fp8.scales import quantise
from iris_kernels.common.operators.parts import joined
from iris_kernels.common.operators.product import in_graph

from .waiting import waited

_WEIGHT_SCALES = ("row", "tensor")


@dataclass(frozen=True)
class Float8:
    """How layers multiply in fp8; x and the output keep their wider dtype.

    Args:
        weight_scales: of what a weight that is quantised as the layer is made has a scale each: "row", an output
            feature, or "tensor". One that is fp8 already has its own.
        training: keep weights in their dtype, quantise them in each call, by rows, and compute gradients. Else weights
            are kept in fp8, over a `weight_scale`, and have no gradients.
        use_fast_accum: leave sums of the forward pass in the tensor cores' accumulators, as ``torch._scaled_mm``'s
            argument of that name does; faster on Hopper, and less exact.

    Raises:
        ValueError: other weight_scales, or any but "row" in training.
    """

    weight_scales: str = "row"
    training: bool = False
    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        if self.weight_scales not in _WEIGHT_SCALES:
            raise ValueError(f"weight_scales is {self.weight_scales!r}; it takes {' or '.join(_WEIGHT_SCALES)}")
        if self.training and self.weight_scales != "row":
            raise ValueError(f"weight_scales is {self.weight_scales!r}; in training it takes row")


def check_how(quantize: object) -> None:
    """Raise ValueError for what is neither a `Float8` nor None."""
    if quantize is not None and not isinstance(quantize, Float8):
        raise ValueError(f"quantize is {quantize!r}; it takes Float8(...), or None for x's dtype")


class Formats(NamedTuple):
    """The fp8 formats of a device: of x and weights, and of gradients."""

    forward: torch.dtype
    gradient: torch.dtype

    @classmethod
    def of(cls, ctx: Context) -> Formats:
        """Return a context's.

        Raises:
            ValueError: its device multiplies no fp8.
        """
        if not (found := fp8_formats(ctx.get_arch())):
            raise ValueError(
                f"quantize is given, and {ctx.get_arch()} multiplies no fp8: compute capability 8.9 and later, gfx942 "
                "and gfx950 do; quantize=None works"
            )
        return cls(*found)


class Scaled(NamedTuple):
    """A matrix, and the fp32 scale by which it is multiplied, one for each row or for all (); None for none."""

    matrix: torch.Tensor
    scale: torch.Tensor | None = None

    @classmethod
    def of(cls, matrix: torch.Tensor, dtype: torch.dtype | None, scale: torch.Tensor | None = None) -> Scaled:
        """Return a matrix in an fp8 format, by its rows or a given scale; as it is if it is fp8, or without a dtype."""
        if dtype is None or is_fp8(matrix.dtype):
            return cls(matrix, scale)
        return cls(*quantise_rows(waited(matrix), dtype, scale))

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what it stands for, in a wider dtype."""
        return self.matrix if self.scale is None else (self.matrix.float() * self.scale).to(dtype)

    @property
    def column_scale(self) -> torch.Tensor | None:
        """The scale of the transposed matrix, for each column or for all."""
        return self.scale if self.scale is None or self.scale.ndim < 2 else self.scale.t()


def stacked(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return weights, or biases, as one, one above the other: a copy, unless it is one, or they lie together.

    A graph does not know whether they do.
    """
    return torch.cat(list(parameters)) if len(parameters) > 1 and in_graph() else joined(parameters, 0)


def stacked_scale(weights: Sequence[Scaled]) -> torch.Tensor | None:
    """Return the scale of weights that are taken as one, for each column of their transpose or for all."""
    if len(weights) == 1 or weights[0].scale is None:
        return weights[0].column_scale
    return stacked([one.scale.expand(len(one.matrix), 1) for one in weights if one.scale is not None]).t()


def quantised_weight(weight: torch.Tensor, how: Float8, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a whole weight in fp8, and its scale, (out_features, 1) or ()."""
    small, scale = quantise(weight, dtype, how.weight_scales)
    return small, scale if how.weight_scales == "row" else scale.reshape(())
