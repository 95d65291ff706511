"""Memory for a model's layers ahead of their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from iris_core.utils.settings import is_whole
from iris_kernels.common.config import is_fp8

from ..sharding.base import NOTHING, Wanted
from .modules import ParallelLinear, local


def prepare(model: nn.Module, max_tokens: int, *, dtype: torch.dtype | None = None, gradients: bool = False) -> None:
    """Make room for calls of a model's layers with up to so many tokens; collective.

    After it no such call allocates on the heap, or waits for the other ranks' hosts: it may be captured in a CUDA graph
    at once. Layers of one size share their memory.

    Args:
        model: its parallel layers are prepared.
        max_tokens: of all ranks together.
        dtype: of x, such as autocast's; None for the weights', or for bf16 where these are kept in fp8.
        gradients: whether calls will compute those of x and of the parameters that have them.

    Raises:
        ValueError: max_tokens is no positive integer, or the model has no parallel layer.
        HeapExhausted: the heap has no room; `iris(heap_size=...)` makes a larger one.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    if not layers or not is_whole(max_tokens):
        raise ValueError(
            f"max_tokens is {max_tokens!r}; it takes a positive integer"
            if layers
            else f"{type(model).__name__} has no parallel layer; make some, or parallelize_module it with our styles"
        )
    for layer in layers:
        weight, bias = local(layer.weight), layer.bias
        wanted = Wanted(True, weight.requires_grad, bias is not None and bias.requires_grad) if gradients else NOTHING
        shared = getattr(layer, "shared", None)  # then calls multiply for all that share
        sharding = layer.sharding if shared is None else shared.sharding
        of_x = (torch.bfloat16 if is_fp8(weight.dtype) else weight.dtype) if dtype is None else dtype
        of_layer: dict[str, Any] = {"has_bias": bias is not None, "scales": _kinds(layer)}
        sharding.prepare(max_tokens, of_x, wanted, **of_layer)
        if layer.sequences is not None:
            layer.sharding_of_all_tokens.prepare(max_tokens, of_x, **of_layer)


def _kinds(layer: ParallelLinear) -> tuple[str, str]:
    """Return of what a layer's x and its transposed weight have a scale each, where it multiplies in fp8."""
    scales, is_shared = layer._scales(), getattr(layer, "shared", None) is not None
    of_weight, of_x = scales["weight_scale"], scales["input_scale"]
    is_of_all = of_weight is not None and of_weight.ndim == 0 and not is_shared
    return "row" if of_x is None else "tensor", "tensor" if is_of_all else "column"
