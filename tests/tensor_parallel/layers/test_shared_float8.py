"""Layers in fp8 that read one x: they quantise it and gather it once, merged or each by itself, and train alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import far, own_rows, released
from ranks import Ranks, context
from test_tensor_parallel_float8 import E4M3, TOKENS, WIDTH, tokens
from torch import nn
from torch_compiling import compiled

from iris_tensor_parallel import (
    ColumnParallelLinear,
    Float8,
    MergedColumnParallelLinear,
    prepare,
    share_products,
)

pytestmark = pytest.mark.parametrize("device", ["cpu"])


def siblings(dtype: torch.dtype = torch.bfloat16, **scales: float) -> list[Any]:
    """Return whole layers of one x, without bias, and with static scales of x by name."""
    torch.manual_seed(3)
    whole: list[Any] = [nn.Linear(WIDTH, size, bias=False, dtype=dtype) for size in (18, 6, 12)]
    for linear, scale in zip(whole, scales.values(), strict=False):
        linear.input_scale = torch.tensor(scale)
    return whole


@released
def merge(rank: int, world_size: int, how: Float8, scales: dict[str, float]) -> tuple[list[Any], Any, list[str]]:
    """Return how far merged layers, and such as share a product, are from each by itself, and what was gathered."""
    ctx, options, whole = context(), {"sequence_parallel": True, "quantize": how}, siblings(**scales)
    x = own_rows(tokens(dtype=torch.bfloat16), rank, world_size)
    apart = [copy.deepcopy(one) for one in whole]
    for one in apart:
        if scales:
            one.input_scale = torch.tensor(max(scales.values()))
    alone = [ColumnParallelLinear.from_linear(ctx, one, **options) for one in apart]
    with torch.no_grad():
        expected = [layer(x) for layer in alone]
        ctx.release_operators()
        merged = MergedColumnParallelLinear.from_linears(ctx, whole, **options)
        prepare(merged, TOKENS)
        made = len(ctx.operators)
        wrong = far(merged.split(merged(x)), expected)
        parent = nn.ModuleList([ColumnParallelLinear.from_linear(ctx, one, **options) for one in whole])
        groups = share_products(parent)
        wrong += far([layer(x) for layer in parent], expected)
    families = [one.family for one in ctx.operators.values()]
    gathered = sorted({str(one.problem.dtype) for one in ctx.operators.values()})
    return wrong, (groups, made, len(families)), [*sorted(set(families)), *gathered]


@pytest.mark.parametrize(
    ("how", "scales"), [(Float8(), {}), (Float8("tensor"), {}), (Float8("tensor"), {"q": 0.03, "k": 0.05, "v": 0.04})]
)
def test_layers_of_one_x_quantise_and_gather_it_once(
    ranks: Callable[[int], Ranks], how: Float8, scales: dict[str, float]
) -> None:
    for wrong, counts, gathered in ranks(2).call(merge, how, scales):
        assert wrong == []
        assert counts == (1, 1, 1)
        assert gathered == ["all_gather_gemm", str(E4M3)]


@released
def quantise_one(rank: int, world_size: int) -> int:
    """Return how many groups share a product where one layer of two multiplies in fp8."""
    first, second, _ = siblings()
    options: dict[str, Any] = {"sequence_parallel": True}
    layers = [
        ColumnParallelLinear.from_linear(context(), first, quantize=Float8(training=True), **options),
        ColumnParallelLinear.from_linear(context(), second, **options),
    ]
    return share_products(nn.ModuleList(layers))


def test_layers_that_multiply_otherwise_do_not_share(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(quantise_one) == [0, 0]


@released
def share_scales(rank: int, world_size: int, how: Float8, sequence_parallel: bool) -> int:
    """Return how many groups there are of layers in fp8."""
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "quantize": how}
    return share_products(
        nn.ModuleList([ColumnParallelLinear.from_linear(context(), one, **options) for one in siblings()])
    )


def test_layers_with_a_scale_of_the_weight_share_what_is_communicated(ranks: Callable[[int], Ranks]) -> None:
    """Else torch multiplies by one scale faster than by scales of rows, and each layer has its own."""
    cases = [(Float8(), False, 1), (Float8(), True, 1), (Float8("tensor"), False, 0), (Float8("tensor"), True, 1)]
    for how, sequence_parallel, groups in cases:
        assert ranks(2).call(share_scales, how, sequence_parallel) == [groups] * 2


class Beside(nn.ModuleList):
    """Layers of one x, whose outputs come beside each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self], 1)


@released
def train_merged(rank: int, world_size: int, sequence_parallel: bool) -> list[Any]:
    """Return how far gradients of layers that share, in a graph, too, and of merged ones, are from those of each."""
    ctx, options = context(), {"sequence_parallel": sequence_parallel, "quantize": Float8(training=True)}
    x, found = own_rows(tokens(), rank, world_size) if sequence_parallel else tokens(), []
    whole = siblings(torch.float32)
    alone = Beside([ColumnParallelLinear.from_linear(ctx, one, **options) for one in whole])
    shares = copy.deepcopy(alone)
    merged = MergedColumnParallelLinear.from_linears(ctx, whole, **options)
    share_products(shares)
    for layers, call in ((alone, alone), (shares, shares), (shares, compiled(shares)), (merged, merged)):
        layers.zero_grad()
        leaf = x.clone().requires_grad_()
        output = call(leaf)
        output.square().sum().backward()
        found.append([output, torch.cat([one.grad for one in layers.parameters()]), leaf.grad])
    each, shared, *others = found
    # The output's gradient has a scale for a row of all layers, where each has its own: x's is rounded otherwise.
    wrong = far(shared[:2], each[:2])
    assert (shared[2] - each[2]).norm() < 0.1 * each[2].norm()
    return wrong + [one for other in others for one in far(other, shared)]


@released
def cast(rank: int, world_size: int, how: Float8) -> tuple[list[Any], list[torch.Size]]:
    """Return how far layers that share a product are from themselves under autocast, and what no tokens give."""
    options: dict[str, Any] = {"sequence_parallel": True, "quantize": how}
    layers = nn.ModuleList([ColumnParallelLinear.from_linear(context(), one, **options) for one in siblings()])
    assert share_products(layers) == 1
    x = own_rows(tokens(dtype=torch.bfloat16), rank, world_size)
    expected = [layer(x) for layer in layers]
    with torch.autocast("cpu", torch.bfloat16):
        found = [layer(x.float()) for layer in layers]
    return far(found, expected), [layer(x[:0], tokens=0).shape for layer in layers]


@pytest.mark.parametrize("how", [Float8(), Float8(training=True)])
def test_autocast_and_no_tokens_are_taken(ranks: Callable[[int], Ranks], how: Float8) -> None:
    for wrong, shapes in ranks(2).call(cast, how):
        assert wrong == []
        assert shapes == [(0, 9), (0, 3), (0, 6)]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layers_of_one_x_train_as_each_by_itself(ranks: Callable[[int], Ranks], sequence_parallel: bool) -> None:
    assert ranks(2).call(train_merged, sequence_parallel) == [[]] * 2
