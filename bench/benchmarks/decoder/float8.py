"""A decoder's linear layers in fp8, by torch: whole, cut without collectives, and cut with torch's functional ones.

All systems have the same weights, over a scale an output feature, and quantise x by its rows with the same kernel, or
where it is compiled with what comes before. All leave sums in the tensor cores' accumulators, as torchao and vLLM do.

In training weights are in x's dtype, and quantised in each call; torch's layers stand under torch's own styles, which
communicate in x's dtype, as they do around torchao's layers with scales of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Shard

from iris_core import Context
from iris_kernels.common.config import fp8_formats
from iris_kernels.common.fp8.scales import dequantised, quantise
from iris_tensor_parallel import Float8
from iris_tensor_parallel.sharding.float8 import Formats, Scaled
from iris_tensor_parallel.sharding.own_products import linear

from .models import linears

HOW = Float8(use_fast_accum=True)
HOW_TO_TRAIN = Float8(training=True, use_fast_accum=True)


def quantise_weights(model: nn.Module, ctx: Context) -> None:
    """Quantise the weights of a model's linear layers, in place, beside a `weight_scale` each."""
    for layer in linears(model):
        small, scale = quantise(layer.weight.detach(), fp8_formats(ctx.get_arch())[0], "row")
        layer.weight = nn.Parameter(small, requires_grad=False)
        layer.register_buffer("weight_scale", scale)


def dequantise_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a model's linear layers what their weights stand for, in a wider dtype, in place."""
    for layer in linears(model):
        scale: Any = layer.weight_scale
        layer.weight = nn.Parameter(dequantised(layer.weight.detach(), scale).to(dtype), requires_grad=False)


class Whole(nn.Linear):
    """A whole layer, or a shard that nothing is communicated for."""

    weight_scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of x (batch, tokens, features)."""
        return self.product(x.flatten(0, -2), x.dtype).unflatten(0, x.shape[:-1])

    def product(self, rows: torch.Tensor | Scaled, dtype: torch.dtype) -> torch.Tensor:
        """Return the product of rows, which are quantised, or are already."""
        x = rows if isinstance(rows, Scaled) else Scaled.of(rows, self.weight.dtype)
        weight = Scaled(self.weight, self.weight_scale)
        return linear(x, [weight], (), dtype, use_fast_accum=HOW.use_fast_accum)


class Gathers:
    """Gathers x in fp8, with its scales, once for layers that are given the same tensor one after the other.

    Args:
        group: of the ranks.
        readers: how many layers there are.
    """

    def __init__(self, group: Any, readers: int) -> None:
        self._group, self._readers = group, readers
        self._x: torch.Tensor | None = None
        self._gathered: Scaled | None = None
        self._left = 0

    def __deepcopy__(self, memo: Any) -> Gathers:
        return Gathers(self._group, self._readers)

    def of(self, x: torch.Tensor, dtype: torch.dtype) -> Scaled:
        """Return the rows of all ranks, one rank's behind the other's."""
        if self._x is not x or self._gathered is None:
            own = x.to_local() if isinstance(x, DTensor) else x
            small, scale = Scaled.of(own.flatten(0, -2), dtype)
            assert scale is not None
            gathered = Scaled(_all_gather(small, self._group), _all_gather(scale, self._group))
            self._x, self._gathered, self._left = x, gathered, self._readers
        found = self._gathered
        self._left -= 1
        if not self._left:
            self._x = self._gathered = None
        assert found is not None
        return found


class Columns(Whole):
    """A shard of a layer's output features, whose x is gathered along the sequence."""

    gathers: Gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of all ranks' tokens; x (batch, this rank's tokens, features), a DTensor or not."""
        own = x.to_local() if isinstance(x, DTensor) else x
        batch, tokens = own.shape[:2]
        product = self.product(self.gathers.of(x, self.weight.dtype), own.dtype)
        by_rank = product.view(-1, batch, tokens, product.shape[1])
        return by_rank.transpose(0, 1).reshape(batch, -1, product.shape[1])


class Rows(Whole):
    """A shard of a layer's input features, whose products are summed: all of them, or scattered along the sequence."""

    group: Any
    is_scattered: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' products; x (batch, tokens, features)."""
        if not self.is_scattered:
            return collectives.all_reduce(super().forward(x), "sum", self.group)
        (batch, tokens, width), ranks = x.shape, self.group.size()
        by_rank = x.view(batch, ranks, tokens // ranks, width).transpose(0, 1).reshape(-1, width)
        product = self.product(by_rank, x.dtype)
        own = collectives.reduce_scatter_tensor(product, "sum", 0, self.group)
        return own.view(batch, tokens // ranks, product.shape[1])


class _Product(torch.autograd.Function):
    """x @ weight.t(), and the gradient of x, in fp8 over scales of rows; the weight's gradient in their own dtype.

    `Float8(training=True)` makes the same products. So does torchao's recipe "rowwise_with_gw_hp", but there the
    weight's gradient is made of an x that is not rounded.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, formats: Formats) -> torch.Tensor:
        rows = Scaled.of(x.flatten(0, -2), formats.forward)
        ctx.save_for_backward(*rows, weight)
        ctx.formats = formats
        by = Scaled.of(weight, formats.forward)
        product = linear(rows, [by], (), x.dtype, use_fast_accum=HOW_TO_TRAIN.use_fast_accum)
        return product.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), (rows, scale, weight) = grads, ctx.saved_tensors
        own = grad.flatten(0, -2)
        by = Scaled.of(weight.t(), ctx.formats.forward)
        of_x = linear(Scaled.of(own, ctx.formats.gradient), [by], (), grad.dtype)
        of_weight = own.t() @ Scaled(rows, scale).dequantised(grad.dtype)
        return of_x.unflatten(0, grad.shape[:-1]), of_weight, None


class Trained(nn.Linear):
    """A layer that quantises x and its weight in each call: whole, a shard, or a DTensor of torch's styles."""

    formats: Formats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of x (batch, tokens, features), a DTensor where the weight is."""
        weight: torch.Tensor = self.weight
        if not isinstance(weight, DTensor):
            return _Product.apply(x, weight, self.formats)
        assert isinstance(x, DTensor)
        of_columns = weight.placements == (Shard(0),)  # where all ranks have x, and a part of its gradient's sum
        own = x.to_local(grad_placements=[Partial()] if of_columns else None)
        product = _Product.apply(own, weight.to_local(), self.formats)
        return DTensor.from_local(product, weight.device_mesh, [Shard(2) if of_columns else Partial()], run_check=False)


def trained(model: Any, ctx: Context) -> Any:
    """Have torch multiply a model's linear layers in fp8, with gradients, in place; return the model."""
    layer: Any
    for layer in linears(model):
        layer.__class__, layer.formats = Trained, Formats.of(ctx)
    return model


def _all_gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
    if rows.is_cuda or rows.itemsize > 1:
        return collectives.all_gather_tensor(rows, 0, group)
    return collectives.all_gather_tensor(rows.view(torch.uint8), 0, group).view(rows.dtype)  # gloo sends no fp8


def as_whole(model: Any) -> Any:
    """Have torch multiply a model's linear layers in fp8, in place; return the model."""
    for layer in linears(model):
        layer.__class__ = Whole
    return model


def with_collectives(model: Any, columns: list[tuple[str, ...]], group: Any, *, is_sequence: bool) -> None:
    """Have shards of a model's linear layers multiply in fp8 and communicate, in place.

    Args:
        model: whose layers are cut.
        columns: of layers that read one x, the names in a decoder layer; all others are cut by input features.
        group: of the ranks.
        is_sequence: whether each rank has a part of every sequence between the layers.
    """
    for decoder in model.layers:
        modules: dict[str, Any] = {name: one for name, one in decoder.named_modules() if isinstance(one, nn.Linear)}
        for names in columns:
            gathers = Gathers(group, len(names))
            for name in names:
                layer = modules.pop(name)
                layer.__class__ = Columns if is_sequence else Whole
                layer.gathers = gathers
        for layer in modules.values():
            layer.__class__, layer.group, layer.is_scattered = Rows, group, is_sequence
