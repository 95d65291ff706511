"""Memory for a model's layers ahead of their calls."""

from __future__ import annotations

import torch
from torch import nn

from ..sharding.base import NOTHING, Wanted
from .modules import ParallelLinear, local


def prepare(model: nn.Module, max_tokens: int, *, dtype: torch.dtype | None = None, gradients: bool = False) -> None:
    """Make room for calls of a model's layers with up to so many tokens; collective.

    After it no such call allocates on the heap, or waits for the other ranks' hosts: it may be captured in a CUDA graph
    at once. Layers of one size share their memory.

    Args:
        model: its parallel layers are prepared.
        max_tokens: of all ranks together.
        dtype: that the layers multiply in, such as autocast's; None for their weights'.
        gradients: whether calls will compute those of x and of the parameters that have them.

    Raises:
        ValueError: max_tokens is below 1, or the model has no parallel layer.
        HeapExhausted: the heap has no room; `iris(heap_size=...)` makes a larger one.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    if not layers or max_tokens < 1:
        raise ValueError(
            f"max_tokens is {max_tokens}; it takes a positive number"
            if layers
            else f"{type(model).__name__} has no parallel layer; make some, or parallelize_module it with our styles"
        )
    for layer in layers:
        weight, bias = local(layer.weight), layer.bias
        wanted = Wanted(True, weight.requires_grad, bias is not None and bias.requires_grad) if gradients else NOTHING
        shared = getattr(layer, "shared", None)  # then calls multiply for all that share
        sharding = layer.sharding if shared is None else shared.sharding
        sharding.prepare(max_tokens, weight.dtype if dtype is None else dtype, wanted, has_bias=bias is not None)
