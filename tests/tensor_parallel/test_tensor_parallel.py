"""Layers sharded over the ranks: outputs and gradients of the whole, whatever is cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from layers import SIZES, cut_pair, draw, far, gradients, own_gradients, own_rows, parameters, released, whole_pair
from ranks import Ranks, context, raised

from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_parallel_linear
from iris_tensor_parallel.sharding.linear import ColumnSharding

on_the_cpu = pytest.mark.parametrize("device", ["cpu"])


@released
def train(rank: int, world_size: int, sequence_parallel: bool, bias: bool, tokens: int) -> Any:
    """Two steps of a pair of layers beside those of the whole, of other data and sizes; return what differs."""
    whole = whole_pair(bias=bias)
    cut = cut_pair(whole, sequence_parallel=sequence_parallel)
    optimizers = [torch.optim.SGD(parameters(pair), lr=0.1) for pair in (whole, cut)]
    wrong = []
    for seed in range(2):
        tokens += seed * world_size
        data = draw(seed, tokens, SIZES[0]), draw(10 + seed, tokens, SIZES[2])
        parts = [own_rows(one, rank, world_size) for one in data] if sequence_parallel else data
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = gradients(whole, *data)
        found = gradients(cut, *parts, **({"tokens": tokens} if sequence_parallel else {}))
        if sequence_parallel:
            expected = own_rows(expected[0], rank, world_size), own_rows(expected[1], rank, world_size)
        wrong += far(found, expected)
        wrong += far([parameter.grad for parameter in parameters(cut)], own_gradients(whole, cut))
        for optimizer in optimizers:
            optimizer.step()
    return wrong


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_pair_of_layers_trains_as_the_whole(
    ranks: Callable[[int], Ranks], world_size: int, sequence_parallel: bool, bias: bool
) -> None:
    assert ranks(world_size).call(train, sequence_parallel, bias, 12) == [[]] * world_size


@pytest.mark.parametrize("tokens", [9, 10])  # on four ranks 3, 3, 3, 0 and 3, 3, 3, 1
def test_tokens_need_not_divide(ranks: Callable[[int], Ranks], tokens: int) -> None:
    assert ranks(4).call(train, True, True, tokens) == [[]] * 4


@released
def use_dimensions(rank: int, world_size: int, sequence_parallel: bool, dim: int) -> Any:
    whole = whole_pair()
    cut = cut_pair(whole, sequence_parallel=sequence_parallel, sequence_dim=dim)
    data = draw(0, 2, 2 * world_size, 3, SIZES[0]), draw(1, 2, 2 * world_size, 3, SIZES[2])

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(world_size, dim)[rank] if sequence_parallel else tensor

    if sequence_parallel and dim == 0:
        data = data[0].transpose(0, 1), data[1].transpose(0, 1)
    expected, found = gradients(whole, *data), gradients(cut, *map(own, data))
    return far(found, map(own, expected)) + far([one.grad for one in parameters(cut)], own_gradients(whole, cut))


@pytest.mark.parametrize(("sequence_parallel", "dim"), [(True, 0), (True, 1), (True, -3), (False, 0)])
def test_tokens_may_have_dimensions(ranks: Callable[[int], Ranks], sequence_parallel: bool, dim: int) -> None:
    assert ranks(2).call(use_dimensions, sequence_parallel, dim) == [[]] * 2


@released
def gather_output(rank: int, world_size: int) -> Any:
    whole = whole_pair()[0]
    layer = ColumnParallelLinear.from_linear(context(), whole, gather_output=True)
    wrong = []
    for seed in range(2):
        x, grad = draw(seed, 5, SIZES[0]), draw(10 + seed, 5, SIZES[1])
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [one(leaf) for one, leaf in zip((whole, layer), leaves, strict=True)]
        torch.autograd.backward(outputs, [grad, grad])
        wrong += far([outputs[1], leaves[1].grad], [outputs[0], leaves[0].grad])
    wrong += far([one.grad for one in layer.parameters()], own_gradients((whole,), (layer,)))
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_may_get_all_features(ranks: Callable[[int], Ranks], world_size: int) -> None:
    assert ranks(world_size).call(gather_output) == [[]] * world_size


@released
def activate(rank: int, world_size: int, kind: str) -> Any:
    """Return what differs of a layer with an activation: without gradients, in training, and in a graph."""
    ctx, tokens = context(), 12
    first, second = whole_pair()
    whole, layer_type = (second, RowParallelLinear) if kind.startswith("row") else (first, ColumnParallelLinear)
    options = {"sequence_parallel": "sequence" in kind, "gather_output": "gathered" in kind}
    options = {name: value for name, value in options.items() if value}
    layer: Any = layer_type.from_linear(ctx, whole, activation="gelu_tanh", **options)

    def own(x: torch.Tensor) -> torch.Tensor:
        """Return a rank's part of the layer's input or output."""
        is_input = x.shape[1] == whole.in_features
        if "sequence" in kind and is_input != kind.startswith("row"):
            return own_rows(x, rank, world_size)
        is_cut = is_input if kind.startswith("row") else not is_input and "gathered" not in kind
        return x[:, layer.sharding.shard(x.shape[1])] if is_cut else x

    x, grad = draw(0, tokens, whole.in_features), draw(1, tokens, whole.out_features)
    leaves = [x.clone().requires_grad_(), own(x).clone().requires_grad_()]
    expected = torch.nn.functional.gelu(whole(leaves[0]), approximate="tanh")
    with torch.no_grad():
        wrong = far([layer(own(x))], [own(expected)])
        torch._dynamo.reset()
        wrong += far([torch.compile(layer, backend="aot_eager", fullgraph=True)(own(x))], [own(expected)])
    output = layer(leaves[1])
    torch.autograd.backward([expected, output], [grad, own(grad)])
    wrong += far([output, leaves[1].grad], [own(expected), own(leaves[0].grad)])
    return wrong + far([layer.weight.grad], own_gradients((whole,), (layer,))[:1])


@pytest.mark.parametrize("kind", ["column", "column sequence", "column gathered", "row", "row sequence"])
def test_a_layer_applies_an_activation(ranks: Callable[[int], Ranks], kind: str) -> None:
    assert ranks(2).call(activate, kind) == [[]] * 2


@released
def norm(rank: int, world_size: int, sequence_parallel: bool, places: int) -> Any:
    """Return what differs of a layer with a residual and a norm: without gradients, in a graph, and in training."""
    ctx, (_, whole), dim = context(), whole_pair(), 1
    layer = RowParallelLinear.from_linear(ctx, whole, sequence_parallel=sequence_parallel, sequence_dim=dim)
    features = layer.sharding.shard(whole.in_features)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        """Return a rank's part of what is as large as the output."""
        return tensor[:, layer.sharding.shard(places)] if sequence_parallel else tensor

    x, residual = draw(0, 2, places, whole.in_features), draw(1, 2, places, whole.out_features)
    weight, grads = draw(2, whole.out_features), [draw(3 + number, *residual.shape) for number in range(2)]
    leaves = [one.clone().requires_grad_() for one in (x, residual, weight)]
    c = whole(leaves[0]) + leaves[1]
    expected = [torch.nn.functional.rms_norm(c, weight.shape, leaves[2], 1e-5), c]
    torch.autograd.backward(expected, grads)
    own_weight = weight.clone().requires_grad_()
    torch.nn.functional.rms_norm(own(c.detach()), weight.shape, own_weight, 1e-5).backward(own(grads[0]))

    def step(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        return layer(x, residual, norm_weight=weight, eps=1e-5)

    parts = (x[..., features], own(residual), weight)
    with torch.no_grad():
        wrong = far(step(*parts), map(own, expected))
        wrong += far([layer(*parts[:2])], [own(c)])
        torch._dynamo.reset()
        wrong += far(torch.compile(step, backend="aot_eager", fullgraph=True)(*parts), map(own, expected))
    of_own = [one.clone().requires_grad_() for one in parts]
    outputs = step(*of_own)
    torch.autograd.backward(outputs, [own(one) for one in grads])
    found = [*outputs, *(one.grad for one in of_own)]
    wanted = [*map(own, expected), leaves[0].grad[..., features], own(leaves[1].grad), own_weight.grad]
    wrong += far(found, wanted) + far([layer.weight.grad], own_gradients((whole,), (layer,))[:1])
    with torch.no_grad():
        errors = [
            raised(layer, parts[0], residual[..., :-1]),
            raised(layer, parts[0], own(residual).double()),
            raised(layer, *parts[:2], norm_weight=weight[:-1]),
        ]
    return wrong, [message.split(": ", 1)[1] for _, message in errors]


@pytest.mark.parametrize(("sequence_parallel", "places"), [(False, 5), (True, 6)])
def test_a_row_parallel_layer_adds_a_residual_and_norms(
    ranks: Callable[[int], Ranks], sequence_parallel: bool, places: int
) -> None:
    for wrong, (of_shape, of_dtype, of_weight) in ranks(2).call(norm, sequence_parallel, places):
        assert wrong == []
        rows = places // 2 if sequence_parallel else places
        assert re.fullmatch(rf"residual is \(2, {places}, \d+\); it must be \(2, {rows}, \d+\)", of_shape)
        assert of_dtype == "x is torch.float32 and residual torch.float64; they must be the same"
        assert re.fullmatch(r"norm_weight is \(\d+,\); it must be \(\d+,\)", of_weight)


@released
def want(rank: int, world_size: int, sequence_parallel: bool, wanted: tuple[bool, bool, bool]) -> Any:
    """Ask for some gradients: x's, the weights', the biases'. Return what differs, and the families of operators."""
    whole = whole_pair()
    cut = cut_pair(whole, sequence_parallel=sequence_parallel)
    for pair in (whole, cut):
        for layer in pair:
            layer.weight.requires_grad_(wanted[1])
            layer.bias.requires_grad_(wanted[2])
    data = draw(0, 8, SIZES[0]), draw(1, 8, SIZES[2])
    outputs, of_x = [], []
    for pair in (whole, cut):
        is_cut = sequence_parallel and pair is cut
        x, grad = (own_rows(one, rank, world_size) if is_cut else one for one in data)
        x = x.clone().requires_grad_(wanted[0])
        outputs.append(pair[1](torch.relu(pair[0](x))))
        outputs[-1].backward(grad)
        of_x.append(x.grad)
    expected = [own_rows(outputs[0], rank, world_size) if sequence_parallel else outputs[0]]
    found = [outputs[1]]
    if wanted[0]:
        expected.append(own_rows(of_x[0], rank, world_size) if sequence_parallel else of_x[0])
        found.append(of_x[1])
    for ours, theirs in zip(cut, whole, strict=True):
        if wanted[1]:
            found.append(ours.weight.grad)
            expected.append(ours.sharding.own_weight(theirs.weight.grad))
        if wanted[2]:
            found.append(ours.bias.grad)
            expected.append(ours.sharding.own_bias(theirs.bias.grad))
    made = [one.family + " kept" * one.keeps_gathered for one in context().operators.values()]
    return far(found, expected), sorted(made)


@on_the_cpu
@pytest.mark.parametrize(
    ("wanted", "made"),
    [
        ((True, False, False), ["all_gather_gemm", "all_gather_gemm", "gemm_reduce_scatter"]),
        ((False, True, False), ["all_gather_gemm kept", "all_gather_gemm kept"]),
        ((False, False, True), ["all_gather_gemm", "all_gather_gemm kept"]),
        ((True, True, True), ["all_gather_gemm kept", "all_gather_gemm kept", "gemm_reduce_scatter"]),
    ],
)
def test_gradients_that_nobody_wants_are_not_computed(
    ranks: Callable[[int], Ranks], wanted: tuple[bool, bool, bool], made: list[str]
) -> None:
    """Of layers whose weights are frozen, or whose input has no gradient: an operator less, or nothing kept."""
    assert ranks(2).call(want, True, wanted) == [([], sorted([*made, "gemm_reduce_scatter"]))] * 2
    # Where all ranks have all tokens, only x's gradient is communicated.
    families = ["gemm_all_reduce"] * (2 if wanted[0] else 1)
    assert ranks(2).call(want, False, wanted) == [([], families)] * 2


@released
def share_an_input(rank: int, world_size: int, kind: str) -> Any:
    """Two layers of one size and one x: backwards the second call of their operator must not spoil the first's."""
    pairs = [whole_pair(seed) for seed in range(2)]
    which = 1 if kind == "row" else 0
    whole = [pair[which] for pair in pairs]
    options = {"sequence_parallel": kind != "replicated"}
    layers = [cut_pair(pair, **options)[which] for pair in pairs]
    x = draw(0, 8, SIZES[which])

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if kind == "replicated":
            return tensor
        return tensor[:, layers[0].sharding.shard(SIZES[1])] if kind == "row" else own_rows(tensor, rank, world_size)

    found = []
    for pair, one in ((layers, own(x)), (whole, x)):
        leaf = one.clone().requires_grad_()
        first, second = pair[0](leaf), pair[1](leaf)
        (first.square().sum() + (second**3).sum()).backward()
        found.append(leaf.grad)
    return far(found[:1], [own(found[1])])


@on_the_cpu
@pytest.mark.parametrize("kind", ["column", "row", "replicated"])
def test_gradients_of_layers_of_one_size_and_one_input(ranks: Callable[[int], Ranks], kind: str) -> None:
    assert ranks(2).call(share_an_input, kind) == [[]] * 2


@released
def use_first(rank: int, world_size: int) -> Any:
    """Call without gradients and then train, with patterns of one's own; return what differs, and which are used."""
    whole = whole_pair()
    patterns = {"variant": "workgroup_specialized:portable", "backward_variant": "bulk_synchronous:portable"}
    cut = cut_pair(whole, sequence_parallel=True, **patterns)
    data = draw(0, 8, SIZES[0]), draw(1, 8, SIZES[2])
    parts = [own_rows(one, rank, world_size) for one in data]
    with torch.no_grad():
        cut[1](cut[0](parts[0]))
    before = list(context().operators.values())
    expected, found = gradients(whole, *data), gradients(cut, *parts)
    wrong = far(found, [own_rows(one, rank, world_size) for one in expected])
    wrong += far([one.grad for one in parameters(cut)], own_gradients(whole, cut))
    made = [one for one in context().operators.values() if one not in before]
    return wrong, {one.variant for one in before}, sorted(f"{one.family}/{one.variant}" for one in made)


@on_the_cpu
def test_a_layer_may_be_used_before_it_is_trained(ranks: Callable[[int], Ranks]) -> None:
    gathers = [
        "all_gather_gemm/bulk_synchronous:portable",
        "all_gather_gemm/workgroup_specialized:portable",
    ]  # the last keeps what came
    made = [*gathers, "gemm_reduce_scatter/bulk_synchronous:portable"]
    assert ranks(2).call(use_first) == [([], {"workgroup_specialized:portable"}, made)] * 2


@released
def differentiate_twice(rank: int, world_size: int) -> list[tuple[str, str]]:
    errors = []
    for sequence_parallel in (False, True):
        for which, layer in enumerate(cut_pair(whole_pair(), sequence_parallel=sequence_parallel)):
            x = draw(0, 4, layer.weight.shape[1])[: 4 if which or not sequence_parallel else 2].requires_grad_()
            (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
            errors.append(raised(first.square().sum().backward))
    return errors


@on_the_cpu
def test_there_are_no_second_derivatives(ranks: Callable[[int], Ranks]) -> None:
    """In place of wrong ones: a graph of what a layer does backwards would lack what it communicates."""
    for errors in ranks(2).call(differentiate_twice):
        assert len(errors) == 4
        for kind, message in errors:
            assert kind == "RuntimeError"
            assert "marked with @once_differentiable" in message


def call_functions(rank: int, world_size: int) -> list[int]:
    ctx, counts = context(), []
    x, weight = draw(1, 4, 6), draw(2, 5, 6)
    with mock.patch.object(
        ColumnSharding, "__post_init__", autospec=True, side_effect=ColumnSharding.__post_init__
    ) as made:
        for options in ({}, {}, {"gather_output": True}, {"gather_output": True, "out_features": 9}, {}):
            column_parallel_linear(ctx, x, weight[: 5 - rank * ("out_features" in options)], **options)
            counts.append(made.call_count)
    error = raised(column_parallel_linear, ctx, x, weight, sequence_parallel=True, sequence_dim=1.0)
    assert error == ("ValueError", "sequence_dim is 1.0; it takes an integer")
    return counts


@pytest.mark.parametrize("device", ["cpu"])
def test_a_function_makes_a_sharding_once(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(call_functions) == [[1, 1, 2, 3, 3]] * 2
