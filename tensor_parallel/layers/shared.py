"""Layers that read one x: they are multiplied as one, at the first one's call, and its gradients are summed once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from iris_kernels.common.operators.parts import lay_together, lie_together
from iris_kernels.common.operators.product import in_graph

from ..sharding.linear import ColumnSharding
from .merged import MergedColumnSharding, split
from .modules import ColumnParallelLinear
from .quantising import SCALES, largest_of

# Options that layers of a group have alike.
_OPTIONS = ("sequence_parallel", "sequence_dim", "variant", "backward_variant", "activation", "quantize")


def share_products(model: nn.Module) -> int:
    """Multiply layers side by side that read the same x as one, such as query, key and value, or gate and up.

    These are column-parallel layers of one module, alike but for their output features, of which each rank has as many,
    and without `gather_output`. The first of them that is called multiplies for all, and the others return what it kept
    for them, if they are given the same tensor or DTensor. Where one is given another, or is not called in a call of
    their module, the group ends, with a warning unless a graph is made. With `sequence_parallel` x is gathered once;
    its gradient is summed over the ranks once in any case.

    Parameters, their names and their gradients are as before. Their memory is moved: weights, biases and scales by rows
    lie together, also after `Module.to` or `Module.to_empty`. Where they no longer do, as in a `copy.deepcopy`, or
    after ``load_state_dict(assign=True)``, calls that communicate, or are in fp8, copy them, until they are given to
    this again. Otherwise than before, outputs are views of one, whose rows lie apart; their gradients are computed in
    one backward pass; x must not be written between the layers' calls in a graph or in inference mode; and in fp8 x has
    the largest of static scales. Of layers with a scale for a whole weight only those with `sequence_parallel` share.

    Args:
        model: cut already, by layers of ours or by `parallelize_module` with our styles.

    Returns:
        How many groups there are that were none before.
    """
    count = 0
    for parent in model.modules():
        groups: dict[Any, list[ColumnParallelLinear]] = {}
        for child in parent.children():
            if isinstance(child, ColumnParallelLinear) and child.shared is not None:
                child.shared.lay_together()
            elif isinstance(child, ColumnParallelLinear) and _may_share(child):
                groups.setdefault(_kind(child), []).append(child)
        for layers in groups.values():
            if len(layers) > 1:
                parent.register_forward_pre_hook(SharedProduct(layers).begin_step)
                count += 1
    return count


def _may_share(layer: ColumnParallelLinear) -> bool:
    sharding = layer.sharding
    is_one = not isinstance(sharding, MergedColumnSharding) and not sharding.gather_output
    # Without communication torch multiplies by a scale of the whole weight faster than by scales of rows.
    is_fit = sharding.sequence_parallel or not _has_one_scale(layer)
    return is_one and is_fit and sharding.out_features % sharding.ctx.get_num_ranks() == 0


def _has_one_scale(layer: ColumnParallelLinear) -> bool:
    scale = layer._scales()["weight_scale"]
    return scale is not None and scale.ndim == 0


def _kind(layer: ColumnParallelLinear) -> tuple[Any, ...]:
    sharding = layer.sharding
    weight, options = layer.weight, [getattr(sharding, name) for name in _OPTIONS]
    return sharding.ctx.name, sharding.in_features, *options, layer.bias is None, weight.dtype, weight.device


def _merged(shardings: Sequence[ColumnSharding]) -> MergedColumnSharding:
    """Return shardings that are alike but for their output features as one."""
    first, sizes = shardings[0], tuple(sharding.out_features for sharding in shardings)
    options = {name: getattr(first, name) for name in _OPTIONS}
    return MergedColumnSharding(first.ctx, first.in_features, sum(sizes), sizes=sizes, **options)


class SharedProduct:
    """What layers of one x share: their product, of which each takes its part.

    Args:
        layers: two or more, that `share_products` found alike; they know it from now on.

    Attributes:
        sharding: of all of them, as one layer.
        sharding_of_all_tokens: as the layers', of steps that have all tokens on every rank; None where each layer is by
            itself in such.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.sharding = _merged([layer.sharding for layer in layers])
        self.sharding_of_all_tokens: Any = None
        if layers[0].sequences is not None and not any(map(_has_one_scale, layers)):
            self.sharding_of_all_tokens = _merged([layer.sharding_of_all_tokens for layer in layers])
        self._layers = tuple(layers)
        self._forget()
        self.lay_together()
        for layer in layers:
            layer.shared = self

    def _forget(self) -> None:
        self._x: torch.Tensor | None = None
        self._whole: DTensor | None = None  # that x is this rank's shard of
        self._state: Any = None  # of x and of autograd, as they were
        self._kept: dict[int, torch.Tensor] = {}

    def __deepcopy__(self, memo: Any) -> SharedProduct:
        copied = copy.copy(self)
        copied._forget()  # outputs of a call, which may have gradients
        memo[id(self)] = copied
        copied._layers = copy.deepcopy(self._layers, memo)
        return copied

    def lay_together(self) -> None:
        """Have the layers' parameters lie together, unless they do, or cannot: on the meta device, or in other places.

        Those that FSDP has cut further stay where they are.
        """
        rows = [layer.sharding._weight_shape[0] for layer in self._layers]
        for name in ("weight", "bias", "weight_scale"):
            parameters = [getattr(layer, name, None) for layer in self._layers]
            shards = [one._local_tensor if isinstance(one, DTensor) else one for one in parameters if one is not None]
            places = {(one.dtype, one.device, one.shape[1:]) for one in shards}
            are_whole = [len(one) for one in shards if one.ndim > 0] == rows
            if are_whole and len(places) == 1 and not shards[0].is_meta and not lie_together(shards):
                lay_together(shards)

    def begin_step(self, parent: nn.Module, inputs: Any) -> None:
        """End the group if the last call of the layers' module has left outputs, which are of another step."""
        if self._kept:
            self._end("some of them were not called")

    def __call__(self, layer: ColumnParallelLinear, x: torch.Tensor, tokens: int | None) -> torch.Tensor:
        """Return one layer's output of x; see `ColumnSharding.__call__`."""
        if layer.has_all_tokens and self.sharding_of_all_tokens is None:
            return layer.by_itself(x, tokens)
        number, state = self._layers.index(layer), self._state_of(x)
        if 0 < len(self._kept) == len(self._layers) - 1 and number not in self._kept:
            return self._alone(layer, x, tokens, "the others were not called")
        if number in self._kept:
            if self._x is not x or self._state != state:
                return self._alone(layer, x, tokens, "they were given different tensors")
            output = self._kept.pop(number)
            if not self._kept:
                self._x = self._whole = None
            return output
        weights, biases = zip(*(one._parts() for one in self._layers), strict=True)
        biases = () if biases[0] is None else biases
        scales = [one._scales() for one in self._layers]
        of_weights, of_x = ([scale[name] for scale in scales] for name in SCALES)
        sharding = self.sharding_of_all_tokens if layer.has_all_tokens else self.sharding
        merged = sharding.of_several(x, weights, biases, of_weights, largest_of(of_x), tokens=tokens)
        outputs = split(merged, [len(weight) for weight in weights])
        self._x, self._state = x, state
        self._kept = {other: output for other, output in enumerate(outputs) if other != number}
        return outputs[number]

    def shard_of(self, whole: DTensor, to_local: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return this rank's shard of a DTensor: to all that are given it the same tensor, as they share by that.

        Args:
            whole: that the layers are given.
            to_local: makes the shard, a new tensor in each call where there are gradients.
        """
        if self._kept and self._whole is whole and self._x is not None and self._state_of(self._x) == self._state:
            return self._x
        self._whole = whole
        return to_local()

    def _alone(self, layer: ColumnParallelLinear, x: torch.Tensor, tokens: int | None, why: str) -> torch.Tensor:
        self._end(why)
        return layer.by_itself(x, tokens)

    def _end(self, why: str) -> None:
        self._forget()
        for one in self._layers:
            one.shared = None
        if not in_graph():
            warnings.warn(
                f"layers of {self.sharding.in_features} to {list(self.sharding.sizes)} features are no longer "
                f"multiplied as one: {why}",
                stacklevel=6,
            )

    @staticmethod
    def _state_of(x: torch.Tensor) -> tuple[Any, ...]:
        kind = x.device.type
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if in_graph():
            return modes
        return *modes, torch.is_inference_mode_enabled(), None if x.is_inference() else x._version
