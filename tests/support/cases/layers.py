"""Layers sharded over the ranks, and the whole ones that they must equal: what their tests share, on a rank."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from ranks import context
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from iris_kernels.common.operators import torch_op
from iris_kernels.common.problem import shard_bounds
from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from iris_tensor_parallel.sharding import base, own_products

SIZES = (10, 14, 6)  # features of a pair of layers: in, between, out; of four ranks not all have as many
LENGTHS = (8, 12, 6, 18, 28, 24, 10, 14, 4, 20, 16, 22)  # of x; a rank that has one token is another graph
CLOSE = 1e-5  # of the norm, in fp32: far above what rounding makes of so few terms, far below what any term weighs


def whole_pair(seed: int = 0, **kwargs: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the same two layers on every rank."""
    torch.manual_seed(seed)
    kwargs = {"device": context().get_device()} | kwargs
    return nn.Linear(*SIZES[:2], **kwargs), nn.Linear(*SIZES[1:], **kwargs)


def cut_pair(pair: tuple[nn.Linear, nn.Linear], **options: Any) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Return this rank's parts of them."""
    column = ColumnParallelLinear.from_linear(context(), pair[0], **options)
    return column, RowParallelLinear.from_linear(context(), pair[1], **options)


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Return the same values on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(context().get_device())


def gradients(
    pair: tuple[nn.Module, nn.Module], x: torch.Tensor, grad: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of two layers and the gradient of x; those of the parameters are left with them."""
    x = x.clone().requires_grad_()
    output = pair[1](torch.relu(pair[0](x, **kwargs)))
    output.backward(grad)
    assert x.grad is not None
    return output.detach(), x.grad


def own_gradients(pair: tuple[Any, Any], cut: tuple[Any, Any]) -> list[torch.Tensor]:
    """Return this rank's parts of the gradients of whole layers' parameters, as `cut` is cut."""
    parts = []
    for whole, part in zip(pair, cut, strict=True):
        parts.append(part.sharding.own_weight(whole.weight.grad))
        if whole.bias is not None:
            parts.append(part.sharding.own_bias(whole.bias.grad))
    return parts


def parameters(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return all parameters."""
    return [parameter for layer in layers for parameter in layer.parameters()]


def far(found: Iterable[Any], expected: Iterable[Any], limit: float = CLOSE) -> list[tuple[int, float]]:
    """Return which are further apart than `limit` of the norm, and by how much; NaN and another shape are."""
    distances = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        distance = float("nan")
        if one.shape == other.shape and one.dtype == other.dtype:
            norm = torch.linalg.vector_norm
            distance = (norm(one.double() - other.double()) / norm(other.double()).clamp(min=1e-30)).item()
        if not distance <= limit:
            distances.append((number, distance))
    return distances


def released(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Give back the memory of the operators that a rank's part of a test has made; collective."""

    @functools.wraps(fn)
    def body(rank: int, world_size: int, *args: Any) -> Any:
        context().release_operators(captured=True)
        found = fn(rank, world_size, *args)
        context().release_operators(captured=True)
        return found

    return body


def own_rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return a rank's rows; torch.chunk would give fewer parts than ranks where some have none."""
    return tensor[slice(*shard_bounds(len(tensor), world_size, rank))]


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the products of each family that are made within the block, eager and in graphs."""
    counts: Counter[str] = Counter()
    multiply = torch_op.multiply

    def count(family: str, *arguments: Any) -> Any:
        counts[family] += 1
        return multiply(family, *arguments)

    with mock.patch.object(torch_op, "multiply", count), mock.patch.object(base, "multiply", count):
        yield counts


class Calls(TorchDispatchMode):
    """Count the calls of torch's ops within the block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def local_products() -> Iterator[list[tuple[int, int, int]]]:
    """Note of each product by several weights without a collective: how many, and the GEMMs and copies that it took."""
    made, multiply = [], own_products._multiply_here

    def noted(x: Any, weights: Any, *others: Any) -> torch.Tensor:
        if len(weights) == 1:
            return multiply(x, weights, *others)
        with Calls() as calls:
            output = multiply(x, weights, *others)
        gemms = sum(calls.counts[name] for name in ("mm", "addmm", "linear", "_scaled_mm"))
        made.append((len(weights), gemms, calls.counts["cat"]))
        return output

    with mock.patch.object(own_products, "_multiply_here", noted):
        yield made
