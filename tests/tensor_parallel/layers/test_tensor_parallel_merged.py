"""Several layers of one x as one: outputs and gradients of each, one collective for all, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import draw, far, own_rows, released
from ranks import Ranks, context, raised
from torch import nn
from torch_compiling import compiled, each_backend

from iris_tensor_parallel import ColumnParallelLinear, MergedColumnParallelLinear

WIDTH, SIZES = 10, (8, 4, 12)
on_the_cpu = pytest.mark.parametrize("device", ["cpu"])


def whole_layers(bias: bool = True) -> list[nn.Linear]:
    """Return the same layers of one x on every rank."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, size, bias, device=context().get_device()) for size in SIZES]


def parts_of(layer: MergedColumnParallelLinear, name: str) -> list[torch.Tensor]:
    """Return the gradient of each layer's part of a parameter."""
    return list(getattr(layer, name).grad.split([size // context().get_num_ranks() for size in SIZES]))


@released
def train(rank: int, world_size: int, sequence_parallel: bool, bias: bool, tokens: int) -> Any:
    """One step of merged layers beside the whole ones; return what differs, and the families of operators."""
    whole = whole_layers(bias)
    merged = MergedColumnParallelLinear.from_linears(context(), whole, sequence_parallel=sequence_parallel)
    x, grads = draw(0, tokens, WIDTH), [draw(1 + number, tokens, size) for number, size in enumerate(SIZES)]
    leaves = [x.clone(), (own_rows(x, rank, world_size) if sequence_parallel else x).clone()]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = [layer(leaves[0]) for layer in whole]
    torch.autograd.backward(expected, grads)
    found = merged.split(merged(leaves[1], **({"tokens": tokens} if sequence_parallel else {})))
    torch.autograd.backward(found, [grad.chunk(world_size, 1)[rank] for grad in grads])
    wrong = far(found, [one.chunk(world_size, 1)[rank] for one in expected])
    of_x = leaves[0].grad
    wrong += far([leaves[1].grad], [own_rows(of_x, rank, world_size) if sequence_parallel else of_x])
    for name in ("weight", "bias") if bias else ("weight",):
        of_whole = [getattr(layer, name).grad.chunk(world_size)[rank] for layer in whole]
        wrong += far(parts_of(merged, name), of_whole)
    return wrong, sorted(one.family for one in context().operators.values())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_merged_layers_train_as_whole_ones_with_one_collective_each_way(
    ranks: Callable[[int], Ranks], world_size: int, sequence_parallel: bool, bias: bool
) -> None:
    made = ["all_gather_gemm", "gemm_reduce_scatter"] if sequence_parallel else ["gemm_all_reduce"]
    found = ranks(world_size).call(train, sequence_parallel, bias, 10)  # on four ranks 3, 3, 3 and 1
    assert found == [([], made)] * world_size


@released
def be_modules(rank: int, world_size: int) -> list[int]:
    """Return which of what is so of modules is not."""
    ctx, whole = context(), whole_layers()
    torch.manual_seed(0)
    drawn = MergedColumnParallelLinear(ctx, WIDTH, SIZES)
    made = MergedColumnParallelLinear.from_linears(ctx, whole)
    x, found = draw(0, 6, WIDTH), []
    found += [torch.equal(one, other) for one, other in zip(drawn.parameters(), made.parameters(), strict=True)]
    found += [list(made.state_dict()) == ["weight", "bias"], made.in_features == WIDTH, made.out_features == sum(SIZES)]
    for name in ("weight", "bias"):  # as who loads a checkpoint of the separate layers does
        whole_one = torch.cat([getattr(layer, name) for layer in whole])
        part = made.sharding.own_weight(whole_one) if name == "weight" else made.sharding.own_bias(whole_one)
        found += [torch.equal(getattr(made, name), part)]
    with torch.no_grad():
        drawn.weight.zero_()
    found += [bool(made.weight.any())]
    torch.manual_seed(0)
    drawn.reset_parameters()
    found += [torch.equal(drawn.weight, made.weight), torch.equal(drawn.bias, made.bias)]
    frozen = [layer.requires_grad_(False).eval() for layer in whole]
    one = MergedColumnParallelLinear.from_linears(ctx, frozen)
    found += [not one.weight.requires_grad, not one.bias.requires_grad, not one.training]
    single = MergedColumnParallelLinear.from_linear(ctx, whole[0])(x)
    found += [torch.equal(single, ColumnParallelLinear.from_linear(ctx, whole[0])(x))]
    found += [repr(one).endswith(f"rank={rank} of 2, sizes=[8, 4, 12])")]
    found += [MergedColumnParallelLinear(ctx, WIDTH, SIZES, bias=False, device="meta").weight.is_meta]
    return [number for number, is_so in enumerate(found) if not is_so]


@on_the_cpu
def test_merged_layers_are_modules(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(be_modules) == [[]] * 2


@released
def compile_merged(rank: int, world_size: int, backend: str) -> Any:
    layer = MergedColumnParallelLinear.from_linears(context(), whole_layers(), sequence_parallel=True)

    def gated(x: torch.Tensor) -> torch.Tensor:
        first, second, third = layer.split(layer(x))
        return torch.cat([nn.functional.silu(first) * 2, second, third], -1)

    x, wrong = own_rows(draw(0, 8, WIDTH), rank, world_size), []
    for fn in (gated, compiled(gated, backend)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        output = fn(leaf)
        output.square().sum().backward()
        wrong.append([output.detach(), leaf.grad, layer.weight.grad, layer.bias.grad])
    return far(*wrong)


@on_the_cpu
@each_backend
def test_merged_layers_are_part_of_a_whole_graph(ranks: Callable[[int], Ranks], backend: str) -> None:
    assert ranks(2).call(compile_merged, backend) == [[]] * 2


@released
def gate(rank: int, world_size: int, sequence_parallel: bool) -> Any:
    """Return what differs of a merged gate and up from whole ones: without gradients, in a graph, and in training."""
    ctx = context()
    torch.manual_seed(0)
    gate, up = (nn.Linear(WIDTH, 8, device=ctx.get_device()) for _ in range(2))
    options = {"sequence_parallel": sequence_parallel, "activation": "swiglu"}
    layer = MergedColumnParallelLinear.from_linears(ctx, [gate, up], **options)
    x, grad = draw(0, 6, WIDTH), draw(1, 6, 8)
    leaves = [x.clone(), (own_rows(x, rank, world_size) if sequence_parallel else x).clone()]
    with torch.no_grad():
        expected = (nn.functional.silu(gate(x)) * up(x)).chunk(world_size, 1)[rank]
        wrong = far([layer(leaves[1])], [expected])
        wrong += far([compiled(layer, "aot_eager")(leaves[1])], [expected])
    for leaf in leaves:
        leaf.requires_grad_()
    whole = nn.functional.silu(gate(leaves[0])) * up(leaves[0])
    output = layer(leaves[1])
    torch.autograd.backward([whole, output], [grad, grad.chunk(world_size, 1)[rank]])
    of_x = leaves[0].grad
    wrong += far([output, leaves[1].grad], [expected, own_rows(of_x, rank, world_size) if sequence_parallel else of_x])
    for name in ("weight", "bias"):
        of_whole = torch.cat([getattr(gate, name).grad, getattr(up, name).grad])
        wrong += far([getattr(layer, name).grad], [layer.sharding.own_weight(of_whole)])
    return wrong


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gate_multiplies_its_up(ranks: Callable[[int], Ranks], sequence_parallel: bool) -> None:
    assert ranks(2).call(gate, sequence_parallel) == [[]] * 2


@released
def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx, whole = context(), whole_layers()
    merge, make = MergedColumnParallelLinear.from_linears, MergedColumnParallelLinear
    cut = ColumnParallelLinear(ctx, WIDTH, 8)
    frozen = nn.Linear(WIDTH, 4).requires_grad_(False)
    return [
        raised(make, ctx, WIDTH, (8, 5)),
        raised(make, ctx, WIDTH, (8, 0)),
        raised(make, ctx, WIDTH, ()),
        raised(make, ctx, 0, (8, 4)),
        raised(lambda: make(ctx, WIDTH, SIZES, gather_output=True)),
        raised(merge, ctx, []),
        raised(merge, ctx, [whole[0], nn.Identity()]),
        raised(merge, ctx, [whole[0], cut]),
        raised(merge, ctx, [whole[0], nn.Linear(WIDTH + 1, 4)]),
        raised(merge, ctx, [whole[0], nn.Linear(WIDTH, 4, bias=False)]),
        raised(merge, ctx, [whole[0], nn.Linear(WIDTH, 4, dtype=torch.bfloat16)]),
        raised(merge, ctx, [whole[0], frozen]),
        raised(merge, ctx, [whole[0], nn.Linear(WIDTH, 4).eval()]),
        raised(make(ctx, WIDTH, SIZES), draw(0, 4, WIDTH + 1)),
        raised(lambda: make(ctx, WIDTH, (8, 4), activation="swiglu")),
        raised(lambda: ColumnParallelLinear(ctx, WIDTH, 8, activation="swiglu")),
        raised(make(ctx, WIDTH, (8, 8), activation="swiglu").split, draw(0, 4, 8)),
    ]


@on_the_cpu
def test_what_cannot_be_merged_is_refused(ranks: Callable[[int], Ranks]) -> None:
    parts = [
        "out_features are [8, 5]; it takes one or more, each a multiple of the 2 ranks",
        "out_features are [8, 0]",
        "out_features are []",
        "in_features is 0",
        "gather_output is of one layer",
        "linears is empty",
        "a layer is a Identity; it must be a torch.nn.Linear",
        "a layer is a ColumnParallelLinear",
        "{'in_features': 10, 'bias': True",
        "'bias': False",
        "'dtype': 'torch.bfloat16'",
        "'requires_grad': [False, False]",
        "'training': False",
        "x is (4, 11); it must be (…, 10)",
        "out_features are [8, 4]; swiglu takes two layers of one size, gate and up",
        "activation is 'swiglu'; it takes relu, gelu, gelu_tanh, silu, or None",
        "with swiglu a gate and its up give one output; nothing is to be split",
    ]
    for errors in ranks(2).call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == "ValueError", message
            assert part in message, message
