"""Layers that read one x: it is gathered once, at the first one's call, and its gradients' sum is scattered once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from iris_kernels.common.operators.parts import Together, lie_together
from iris_kernels.common.operators.product import in_graph

from .merged import MergedColumnSharding, split
from .modules import ColumnParallelLinear
from .quantising import SCALES, largest_of


def share_gathers(model: nn.Module) -> int:
    """Have layers side by side that read the same x gather it once, such as query, key and value, or gate and up.

    These are column-parallel layers of one module, with `sequence_parallel`, alike but for their output features, of
    which each rank has as many. The first of them that is called multiplies for all, and the others return what it
    kept for them, if they are given the same tensor or DTensor; where one is given another, the group ends, with a
    warning. Nothing else changes: parameters, their names and their gradients are as before. Only their memory is
    moved: the weights of layers that share lie together, as they are multiplied at once, also after `Module.to` or
    `Module.to_empty`. Where they no longer do, as in a `copy.deepcopy`, or after ``load_state_dict(assign=True)``, each
    call copies them, until they are given to this again.

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
                SharedGather(layers)
                count += 1
    return count


def _may_share(layer: ColumnParallelLinear) -> bool:
    sharding = layer.sharding
    is_one = not isinstance(sharding, MergedColumnSharding)
    return is_one and sharding.sequence_parallel and sharding.out_features % sharding.ctx.get_num_ranks() == 0


def _kind(layer: ColumnParallelLinear) -> tuple[Any, ...]:
    sharding = layer.sharding
    options = sharding.sequence_dim, sharding.variant, sharding.backward_variant, sharding.activation, sharding.quantize
    weight = layer.weight
    return sharding.ctx.name, sharding.in_features, *options, layer.bias is None, weight.dtype, weight.device


class SharedGather:
    """What layers of one x share: their product, of which each takes its part.

    Args:
        layers: two or more, that `share_gathers` found alike; they know it from now on.

    Attributes:
        sharding: of all of them, as one layer.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        sharding = layers[0].sharding
        sizes = tuple(layer.sharding.out_features for layer in layers)
        self.sharding = MergedColumnSharding(
            sharding.ctx,
            sharding.in_features,
            sum(sizes),
            sizes=sizes,
            sequence_parallel=True,
            sequence_dim=sharding.sequence_dim,
            variant=sharding.variant,
            backward_variant=sharding.backward_variant,
            activation=sharding.activation,
            quantize=sharding.quantize,
        )
        self._layers = tuple(layers)
        self._x: torch.Tensor | None = None
        self._whole: DTensor | None = None  # that x is this rank's shard of
        self._state: Any = None  # of x and of autograd, as they were
        self._kept: dict[int, torch.Tensor] = {}
        self._together: Together | None = None
        self.lay_together()
        for layer in layers:
            layer.shared = self

    def lay_together(self) -> None:
        """Have the layers' weights lie together, unless they do, or cannot: on the meta device, or in different places.

        Weights that FSDP has cut further stay where they are.
        """
        weights = [layer.weight for layer in self._layers]
        shards = [weight._local_tensor if isinstance(weight, DTensor) else weight for weight in weights]
        if lie_together(shards):
            return
        self._together = None  # whose memory nothing else reads
        places = {(shard.dtype, shard.device) for shard in shards}
        shapes = [layer.sharding._weight_shape for layer in self._layers]
        if len(places) == 1 and [one.shape for one in shards] == shapes and not shards[0].is_meta:
            self._together = Together(shards)

    def __call__(self, layer: ColumnParallelLinear, x: torch.Tensor, tokens: int | None) -> torch.Tensor:
        """Return one layer's output of x; see `ColumnSharding.__call__`."""
        number, state = self._layers.index(layer), self._state_of(x)
        if number in self._kept:
            if self._x is not x or self._state != state:
                return self._alone(layer, x, tokens)
            output = self._kept.pop(number)
            if not self._kept:
                self._x = self._whole = None
            return output
        weights, biases = zip(*(one._parts() for one in self._layers), strict=True)
        biases = () if biases[0] is None else biases
        scales = [one._scales() for one in self._layers]
        of_weights, of_x = ([scale[name] for scale in scales] for name in SCALES)
        merged = self.sharding.of_several(x, weights, biases, of_weights, largest_of(of_x), tokens=tokens)
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

    def _alone(self, layer: ColumnParallelLinear, x: torch.Tensor, tokens: int | None) -> torch.Tensor:
        if not in_graph():
            self._x, self._whole, self._kept = None, None, {}
            for one in self._layers:
                one.shared = None
            warnings.warn(
                f"layers of {self.sharding.in_features} to {list(self.sharding.sizes)} features no longer share their "
                "gather: they were given different tensors",
                stacklevel=5,
            )
        return layer.sharding(x, *layer._parts(), tokens=tokens, **layer._scales())

    @staticmethod
    def _state_of(x: torch.Tensor) -> tuple[Any, ...]:
        if in_graph():
            return (torch.is_grad_enabled(),)
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), None if x.is_inference() else x._version
