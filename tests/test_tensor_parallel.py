"""Layers cut over the ranks: outputs and gradients of the whole, whatever is cut, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import SIZES, cut_pair, draw, far, gradients, own_gradients, parameters, released, whole_pair
from ranks import Ranks, context, raised
from torch.utils.checkpoint import checkpoint

from iris_tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linear,
    row_parallel_linear,
)

on_the_cpu = pytest.mark.parametrize("device", ["cpu"])


def own_rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """As torch.chunk, which gives fewer parts than ranks where some have none."""
    chunk = -(-len(tensor) // world_size)
    return tensor[rank * chunk : (rank + 1) * chunk]


@released
def train(rank: int, world_size: int, sequence_parallel: bool, bias: bool, tokens: int) -> Any:
    """Two steps of a pair of layers beside those of the whole, each with other data; return what differs."""
    whole = whole_pair(bias=bias)
    cut = cut_pair(whole, sequence_parallel=sequence_parallel)
    optimizers = [torch.optim.SGD(parameters(pair), lr=0.1) for pair in (whole, cut)]
    wrong = []
    for seed in range(2):
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
            expected.append(ours.cut.own_weight(theirs.weight.grad))
        if wanted[2]:
            found.append(ours.bias.grad)
            expected.append(ours.cut.own_bias(theirs.bias.grad))
    has_others = any(one.grad is not None for one in parameters(cut) if not one.requires_grad)
    return far(found, expected), has_others, sorted(one.family for one in context().operators.values())


@on_the_cpu
@pytest.mark.parametrize(
    ("wanted", "backwards"),
    [
        ((True, False, False), ["all_gather_gemm", "gemm_reduce_scatter"]),
        ((False, True, False), ["all_gather_gemm"]),
        ((False, False, True), ["all_gather_gemm"]),
        ((True, True, True), ["all_gather_gemm", "gemm_reduce_scatter"]),
    ],
)
def test_gradients_that_nobody_wants_are_not_computed(
    ranks: Callable[[int], Ranks], wanted: tuple[bool, bool, bool], backwards: list[str]
) -> None:
    """Of layers whose weights are frozen, or whose input has no gradient: an operator less."""
    families = sorted(["all_gather_gemm", "gemm_reduce_scatter", *backwards])
    assert ranks(2).call(want, True, wanted) == [([], False, families)] * 2
    # Where all ranks have all tokens, only x's gradient is communicated.
    families = ["gemm_all_reduce"] * (2 if wanted[0] else 1)
    assert ranks(2).call(want, False, wanted) == [([], False, families)] * 2


@released
def share_operators(rank: int, world_size: int) -> Any:
    """Three layers of one size in a row, then two that do not copy."""
    ctx, x = context(), draw(0, 8, SIZES[0])
    whole = [whole_pair(seed, bias=False)[0] for seed in range(3)]
    own = x.chunk(world_size)[rank].clone().requires_grad_()
    layers = [ColumnParallelLinear.from_linear(ctx, one, sequence_parallel=True) for one in whole]
    outputs = [layer(own) for layer in layers]
    expected = [(x @ one.weight.t()).chunk(world_size, 1)[rank] for one in whole]
    wrong = far(outputs, expected)
    made = len(ctx.operators)
    layers = [ColumnParallelLinear.from_linear(ctx, one, sequence_parallel=True, copy_output=False) for one in whole]
    with torch.no_grad():
        kept = [layer(own) for layer in layers]
    same = [one.data_ptr() == kept[0].data_ptr() for one in kept]
    wrong += far(kept, [expected[2]] * 3)
    squares = [layer(own).square() for layer in layers[:2]]  # autograd keeps the first's, and the second overwrites it
    return wrong, made, same, raised(squares[0].sum().backward)


@on_the_cpu
def test_layers_of_one_size_share_operators_and_not_outputs(ranks: Callable[[int], Ranks]) -> None:
    for wrong, made, same, (kind, message) in ranks(2).call(share_operators):
        assert wrong == []
        assert made == 2  # one forwards, one backwards
        assert same == [True] * 3
        assert kind == "RuntimeError"
        assert "modified by an inplace operation" in message


@released
def be_a_module(rank: int, world_size: int) -> list[int]:
    """Return which of what is so of modules is not."""
    ctx = context()
    device = ctx.get_device()
    whole = whole_pair()
    torch.manual_seed(0)
    column, row = ColumnParallelLinear(ctx, *SIZES[:2]), RowParallelLinear(ctx, *SIZES[1:])
    found = []
    for layer, linear in zip((column, row), whole, strict=True):  # with one seed, those of the whole
        found += [torch.equal(layer.weight, layer.cut.own_weight(linear.weight))]
        found += [torch.equal(layer.bias, layer.cut.own_bias(linear.bias))]
    torch.manual_seed(rank)
    biases = ctx.group.all_gather(RowParallelLinear(ctx, *SIZES[1:]).bias.tolist(), "compare")
    found += [biases[0] == biases[1]]
    torch.manual_seed(0)
    other = RowParallelLinear(ctx, *SIZES[1:], dtype=torch.bfloat16, bias=False, sequence_parallel=True)
    found += [other.bias is None, other.weight.dtype == torch.bfloat16, other.weight.device == device]
    found += [ColumnParallelLinear(ctx, *SIZES[:2], device="meta").weight.is_meta]
    state = copy.deepcopy(column.state_dict())
    copied = copy.deepcopy(column)
    with torch.no_grad():
        copied.weight.zero_()
    found += [list(state) == ["weight", "bias"], copied.cut.ctx is ctx, bool(column.weight.any())]
    copied.load_state_dict(state)
    x = draw(0, 4, SIZES[0])
    found += [torch.equal(copied(x), column(x))]
    frozen = whole[0].requires_grad_(False).eval()
    layer = ColumnParallelLinear.from_linear(ctx, frozen)
    found += [not layer.weight.requires_grad, not layer.training, layer.weight.data_ptr() != frozen.weight.data_ptr()]
    return [number for number, is_so in enumerate(found) if not is_so]


@on_the_cpu
def test_layers_are_modules_as_linear_is(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(be_a_module) == [[]] * 2


@released
def use_modes(rank: int, world_size: int) -> Any:
    """Autocast, recomputed activations, inference."""
    whole = whole_pair()
    cut = cut_pair(whole, sequence_parallel=True)
    x, grad = draw(0, 8, SIZES[0]), draw(1, 8, SIZES[2])
    parts = own_rows(x, rank, world_size), own_rows(grad, rank, world_size)
    expected = gradients(whole, x, grad)
    own = [own_rows(one, rank, world_size) for one in expected]
    of_parameters = own_gradients(whole, cut)
    leaf = parts[0].clone().requires_grad_()
    output = checkpoint(lambda x: cut[1](torch.relu(cut[0](x))), leaf, use_reentrant=False)
    output.backward(parts[1])
    wrong = far([output, leaf.grad], own) + far([one.grad for one in parameters(cut)], of_parameters)
    for one in parameters(cut):
        one.grad = None
    with torch.autocast(context().get_device().type, torch.bfloat16):
        leaf = parts[0].clone().requires_grad_()
        output = cut[1](torch.relu(cut[0](leaf)))
    output.float().backward(parts[1])
    dtypes = [str(one.dtype) for one in (output, leaf.grad, *[one.grad for one in parameters(cut)])]
    narrow = far([output.float(), leaf.grad], own, limit=2e-2)
    narrow += far([one.grad for one in parameters(cut)], of_parameters, limit=2e-2)
    with torch.inference_mode():
        wrong += far([cut[1](torch.relu(cut[0](parts[0])))], own[:1])
    return wrong, narrow, dtypes


@on_the_cpu
def test_layers_know_of_torchs_modes(ranks: Callable[[int], Ranks]) -> None:
    for wrong, narrow, dtypes in ranks(2).call(use_modes):
        assert wrong == []
        assert narrow == []
        assert dtypes == ["torch.bfloat16", *["torch.float32"] * 5]


@released
def call_functions(rank: int, world_size: int) -> Any:
    ctx, whole, x = context(), whole_pair(), draw(0, 10, SIZES[0])
    cut = cut_pair(whole, sequence_parallel=True)
    expected = own_rows(whole[1](torch.relu(whole[0](x))), rank, world_size)
    sizes = {"out_features": SIZES[1], "tokens": 10}
    hidden = column_parallel_linear(
        ctx, own_rows(x, rank, world_size), cut[0].weight, cut[0].bias, sequence_parallel=True, **sizes
    )
    output = row_parallel_linear(
        ctx, torch.relu(hidden), cut[1].weight, cut[1].bias, in_features=SIZES[1], sequence_parallel=True
    )
    return far([output], [expected]), output.requires_grad


@on_the_cpu
def test_functions_do_what_layers_do(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).call(call_functions) == [([], True)] * 4


@released
def release(rank: int, world_size: int) -> Any:
    ctx, layer = context(), ColumnParallelLinear(context(), *SIZES[:2], gather_output=True)
    x = draw(0, 4, SIZES[0])
    with torch.no_grad():
        before = layer(x)
        (operator,) = ctx.operators.values()
        ctx.release_operators()
        error = raised(operator, x, layer.weight.t())
        return error, torch.equal(layer(x), before), len(ctx.operators)


@on_the_cpu
def test_operators_that_were_released_are_made_again(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), same, made in ranks(2).call(release):
        assert kind == "RuntimeError"
        assert "gemm_all_scatter" in message
        assert "was closed" in message
        assert same
        assert made == 1


@released
def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    column = ColumnParallelLinear(ctx, *SIZES[:2], sequence_parallel=True)
    row = RowParallelLinear(ctx, *SIZES[1:], sequence_parallel=True, sequence_dim=1)
    x, hidden = draw(0, 4, SIZES[0]), draw(1, 2, 3, SIZES[1]).chunk(world_size, -1)[rank]
    weight = torch.nn.Parameter(column.weight[1:].detach())
    return [
        raised(column, x[:, 1:]),
        raised(column, x[0]),
        raised(column, x.half()),
        raised(column, x, tokens=6),
        raised(row, hidden),
        raised(row, hidden[..., 1:]),
        raised(column.cut, x, weight),
        raised(column.cut, x, column.weight, column.bias[1:]),
        raised(ColumnParallelLinear(ctx, *SIZES[:2]), x, tokens=9),
        raised(ColumnParallelLinear, ctx, *SIZES[:2], sequence_parallel=True, gather_output=True),
        raised(ColumnParallelLinear.from_linear, ctx, torch.nn.Identity()),
        raised(RowParallelLinear(ctx, *SIZES[1:], sequence_parallel=True, sequence_dim=2), hidden),
        raised(ColumnParallelLinear(ctx, *SIZES[:2], variant="fastest", gather_output=True), x),
        raised(column_parallel_linear, ctx, x, weight, out_features=0),
        raised(pickle.dumps, column),
    ]


@on_the_cpu
def test_what_does_not_fit_is_refused_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    parts = [
        "column-parallel layer of 10 to 14 features: x is (4, 9); it must be (…, 10)",
        "x is (10,)",
        "x is torch.float16 and weight torch.float32",
        "the operator was made for (3, 10) (M=6",
        "its length must be a multiple of the 2 ranks",
        "row-parallel layer of 14 to 6 features: x is (2, 3, 6); it must be (…, 7)",
        "weight is (6, 10); this rank's must be (7, 10)",
        "bias is (6,); this rank's must be (7,)",
        "tokens is 9, but x has 4",
        "one of both",
        "linear is a Identity; it must be a torch.nn.Linear",
        "sequence_dim is 2",
        "unknown variant 'fastest'",
        "out_features is 0",
        "save its state_dict()",
    ]
    for errors in ranks(2).call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == ("TypeError" if "state_dict" in part else "ValueError"), message
            assert part in message, message
