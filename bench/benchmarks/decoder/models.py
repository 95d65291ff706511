"""The decoders that are measured: sizes of known models, made of transformers' Llama layers with random weights."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin of the rotary embedding, (1, tokens, head width)
Block = Callable[[nn.Module, torch.Tensor, Angles, dict[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """What a layer of a model consists of."""

    width: int
    features: int
    heads: int
    key_value_heads: int

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self.width // self.heads


MODELS = {
    "tiny": Sizes(width=32, features=64, heads=4, key_value_heads=2),
    "llama-3-8b": Sizes(width=4096, features=14336, heads=32, key_value_heads=8),
    "llama-3-70b": Sizes(width=8192, features=28672, heads=64, key_value_heads=8),
}


def check_transformers() -> None:
    """Raise ValueError unless transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "the models need transformers, which is not installed: pip install 'iris-overlap[transformers]'"
        )


def make_model(sizes: Sizes, layers: int, device: torch.device, seed: int) -> Any:
    """Return a `LlamaModel` in fp32 whose linear layers keep the norm of what they are given; the same on every rank.

    Its embedding is left small, as layers are called without it.
    """
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=sizes.width,
        intermediate_size=sizes.features,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        attn_implementation="sdpa",
    )
    with device:
        model = LlamaModel(config)
    random = torch.Generator(device).manual_seed(seed)
    for linear in linears(model):
        with torch.no_grad():
            linear.weight.normal_(0.0, linear.in_features**-0.5, generator=random)
    return model.eval()


def linears(model: nn.Module) -> list[nn.Linear]:
    """Return a model's linear layers, in their order."""
    return [one for one in model.modules() if isinstance(one, nn.Linear)]


def parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's layers and of its last norm, by name."""
    return {name: one for name, one in model.named_parameters() if name.startswith(("layers.", "norm."))}


class Past:
    """One layer's keys and values of the tokens before this one, which takes the last place, in every step the same.

    Args:
        keys, values: (batch, heads, past + 1, head width), of this rank's heads.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any) -> Any:
        """Write a token's key and value; return all. The signature is that of transformers' caches."""
        self.keys[:, :, -1:].copy_(key)
        self.values[:, :, -1:].copy_(value)
        return self.keys, self.values


def block(layer: nn.Module, x: torch.Tensor, angles: Angles, options: dict[str, Any]) -> torch.Tensor:
    """Return a decoder layer's output of x, (batch, tokens, width); attention is causal."""
    output = layer(x, position_embeddings=angles, **options)
    return output[0] if isinstance(output, tuple) else output


def run(model: Any, call: Block, x: torch.Tensor, angles: Angles, pasts: Sequence[Past]) -> torch.Tensor:
    """Return what a model's layers and its last norm make of x.

    Args:
        model: whole, or a rank's part.
        call: `block`, or what was compiled of it.
        x: (batch, tokens, width); where sequences are cut, this rank's tokens.
        angles: of all tokens' positions.
        pasts: one a layer; or none.
    """
    name = _cache_name(type(model.layers[0]).forward)
    for number, layer in enumerate(model.layers):
        x = call(layer, x, angles, {name: pasts[number], "use_cache": True} if pasts else {})
    return model.norm(x)


@functools.cache
def _cache_name(forward: Callable[..., Any]) -> str:
    """Return what layers call their cache, which differs between versions of transformers."""
    taken = inspect.signature(forward).parameters
    return next(name for name in ("cache", "past_key_values", "past_key_value") if name in taken)
