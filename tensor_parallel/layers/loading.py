"""From the weights of a whole model to those of one whose layers are cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from iris_kernels.common.config import is_fp8
from iris_kernels.common.operators.parts import joined

from ..sharding.float8 import quantised_weight
from .modules import ParallelLinear
from .quantising import SCALES, scales_by_row


def load_whole(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True, assign: bool = False
) -> Any:
    """Load the state_dict of a whole model into one with cut layers, which take this rank's shards.

    A `MergedColumnParallelLinear` takes whole weights one above the other, in the order of its outputs, under its own
    name: ``state["qkv.weight"] = torch.cat([query, key, value])``. Each rank gives all tensors, nothing is sent. Wider
    weights of a layer that keeps its own in fp8 are quantised, and need no `weight_scale`.

    Args:
        model: its modules are named as in `state`.
        state: whole tensors by name, on any device.
        strict: whether all names must be there, and no others.
        assign: take the tensors as they are, on their device and of their type, rather than copy what is in them: for
            a model whose parameters are on the meta device.

    Returns:
        What `torch.nn.Module.load_state_dict` does: the names that are missing, and those that nothing has.

    Raises:
        ValueError: a tensor of a cut layer is not of the whole layer's size, or the layer's parameters are DTensors.
        RuntimeError: names are missing, or not those of the model; what `torch.nn.Module.load_state_dict` raises.
    """
    own = dict(state)
    for path, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLinear):
            _quantise_for(layer, f"{path}." if path else "", own)
            for name, parameter in layer.named_parameters(recurse=False):
                key = f"{path}.{name}" if path else name
                if key in own:
                    own[key] = _own_part(key, layer, name, parameter, own[key])
    return model.load_state_dict(own, strict=strict, assign=assign)


def _own_part(key: str, layer: ParallelLinear, name: str, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{key} is a DTensor, made by parallelize_module; torch.distributed.checkpoint.state_dict loads it: "
            "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))"
        )
    sharding = layer.sharding
    features = sharding.out_features
    shapes = {"weight": (features, sharding.in_features), "bias": (features,), "input_scale": ()}
    sizes = shapes.get(name, (features, 1) if parameter.ndim else ())
    if name in SCALES and whole.numel() == 1:
        whole = whole.expand(sizes)  # that of a tensor is every feature's
    if tuple(whole.shape) != sizes:
        raise ValueError(f"{key} is {tuple(whole.shape)}; the whole layer's is {sizes}")
    cut = {"weight": sharding.own_weight, "bias": sharding.own_bias}.get(name, sharding.own_scale)
    part = cut(whole)
    return part.detach().clone(memory_format=torch.contiguous_format)  # not a view, which would keep the whole


def _quantise_for(layer: ParallelLinear, prefix: str, state: dict[str, torch.Tensor]) -> None:
    """Quantise a whole weight in a state, for a layer that keeps its own in fp8."""
    key, how = f"{prefix}weight", layer.sharding.quantize
    if is_fp8(layer.weight.dtype) and key in state and not is_fp8(state[key].dtype):
        whole, sizes = state[key].detach(), getattr(layer.sharding, "sizes", ())
        if sizes and sum(sizes) == len(whole):  # each of merged layers has scales of its own, as if made of layers
            each = [quantised_weight(one, how, layer.weight.dtype) for one in whole.split(sizes)]
            small = joined([one for one, _ in each], 0)
            scale = scales_by_row([one for _, one in each], sizes)
        else:
            small, scale = quantised_weight(whole, how, layer.weight.dtype)
        state |= {key: small, f"{prefix}weight_scale": scale}
