"""Layers sharded over the ranks as modules and functions: what they share, torch's modes, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from layers import SIZES, cut_pair, draw, far, gradients, own_gradients, own_rows, parameters, released, whole_pair
from ranks import Ranks, close_context, context, raised
from torch import nn
from torch.utils.checkpoint import checkpoint

from iris_core import iris
from iris_tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linear,
    prepare,
    row_parallel_linear,
)

pytestmark = pytest.mark.parametrize("device", ["cpu"])


@released
def share_operators(rank: int, world_size: int) -> Any:
    """Three layers of one size in a row."""
    ctx, x = context(), draw(0, 8, SIZES[0])
    whole = [whole_pair(seed, bias=False)[0] for seed in range(3)]
    own = x.chunk(world_size)[rank].clone().requires_grad_()
    layers = [ColumnParallelLinear.from_linear(ctx, one, sequence_parallel=True) for one in whole]
    outputs = [layer(own) for layer in layers]
    expected = [(x @ one.weight.t()).chunk(world_size, 1)[rank] for one in whole]
    wrong = far(outputs, expected)
    sum(output.sum() for output in outputs).backward()
    return wrong, len(ctx.operators)


def test_layers_of_one_size_share_operators_and_not_outputs(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(share_operators) == [([], 2)] * 2  # one forwards, one backwards


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
        found += [torch.equal(layer.weight, layer.sharding.own_weight(linear.weight))]
        found += [torch.equal(layer.bias, layer.sharding.own_bias(linear.bias))]
    torch.manual_seed(rank)
    biases = ctx.control_plane.all_gather(RowParallelLinear(ctx, *SIZES[1:]).bias.tolist(), "compare")
    found += [biases[0] == biases[1]]
    torch.manual_seed(0)
    other = RowParallelLinear(ctx, *SIZES[1:], dtype=torch.bfloat16, bias=False, sequence_parallel=True)
    found += [other.bias is None, other.weight.dtype == torch.bfloat16, other.weight.device == device]
    found += [ColumnParallelLinear(ctx, *SIZES[:2], device="meta").weight.is_meta]
    state = copy.deepcopy(column.state_dict())
    copied = copy.deepcopy(column)
    with torch.no_grad():
        copied.weight.zero_()
    found += [list(state) == ["weight", "bias"], copied.sharding.ctx is ctx, bool(column.weight.any())]
    copied.load_state_dict(state)
    x = draw(0, 4, SIZES[0])
    found += [torch.equal(copied(x), column(x))]
    frozen = whole[0].requires_grad_(False).eval()
    layer = ColumnParallelLinear.from_linear(ctx, frozen)
    found += [not layer.weight.requires_grad, not layer.training, layer.weight.data_ptr() != frozen.weight.data_ptr()]
    return [number for number, is_so in enumerate(found) if not is_so]


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


def test_layers_know_of_torchs_modes(ranks: Callable[[int], Ranks]) -> None:
    for wrong, narrow, dtypes in ranks(2).call(use_modes):
        assert wrong == []
        assert narrow == []
        assert dtypes == ["torch.bfloat16", *["torch.float32"] * 5]


@released
def cast_what_is_added(rank: int, world_size: int) -> list[bool]:
    """Return whether a residual and a norm's weight are cast as x is, under autocast."""
    layer = RowParallelLinear(context(), *SIZES[1:])
    x, residual, weight = draw(rank, 4, layer.weight.shape[1]), draw(7, 4, SIZES[2]), draw(8, SIZES[2])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = layer(x, residual, norm_weight=weight)
        expected = layer(*(one.bfloat16() for one in (x, residual)), norm_weight=weight.bfloat16())
    return [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]


def test_autocast_is_of_a_residual_and_a_norm_too(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(cast_what_is_added) == [[True, True]] * 2


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


def test_functions_do_what_layers_do(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).call(call_functions) == [([], True)] * 4


@released
def release(rank: int, world_size: int) -> Any:
    ctx, layer = context(), ColumnParallelLinear(context(), *SIZES[:2], gather_output=True)
    x = draw(0, 4, SIZES[0]).requires_grad_()
    with torch.no_grad():
        before = layer(x)
        (operator,) = ctx.operators.values()  # none for gradients
        ctx.release_operators()
        error = raised(operator, x, layer.weight.t())
        return error, torch.equal(layer(x), before), len(ctx.operators)


def test_operators_that_were_released_are_made_again(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), same, made in ranks(2).call(release):
        assert kind == "RuntimeError"
        assert "gemm_all_scatter" in message
        assert "was closed" in message
        assert same
        assert made == 1


@released
def want_another_gradient(rank: int, world_size: int) -> tuple[str, str]:
    ctx, layer = context(), ColumnParallelLinear(context(), *SIZES[:2], sequence_parallel=True)
    x = draw(0, 4, SIZES[0]).requires_grad_(rank == 0)
    ctx.debug_mode = True
    error = raised(layer, x)
    ctx.debug_mode = False
    return error


def test_in_debug_mode_ranks_that_want_other_gradients_are_told(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(want_another_gradient):
        assert kind == "ValueError"
        assert "the gradients they want must be the same" in message
        assert "column-parallel layer of 10 to 14 features" in message
        assert "'x': True" in message
        assert "'x': False" in message


@released
def prepare_a_pair(rank: int, world_size: int, sequence_parallel: bool) -> tuple[int, list[Any], list[tuple[str, str]]]:
    """Train with several numbers of tokens; return by how much the heap grew after `prepare`, and what is refused."""
    ctx, pair, grown = context(), nn.Sequential(*cut_pair(whole_pair(), sequence_parallel=sequence_parallel)), 0
    prepare(pair, 24, gradients=True)
    used, made, wrong = ctx.heap.allocator.used_bytes, len(ctx.operators), []
    for tokens in (6, 24, 12):
        x = draw(0, tokens, SIZES[0])
        own = own_rows(x, rank, world_size) if sequence_parallel else x
        output = pair(own.clone().requires_grad_())
        output.sum().backward()
        expected = nn.Sequential(*whole_pair())(x)
        wrong += far([output], [own_rows(expected, rank, world_size) if sequence_parallel else expected])
        grown += ctx.heap.allocator.used_bytes - used + len(ctx.operators) - made
    return grown, wrong, [raised(prepare, pair, 0), raised(prepare, nn.Linear(2, 2), 8)]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_nothing_is_made_after_prepare(ranks: Callable[[int], Ranks], sequence_parallel: bool) -> None:
    for grown, wrong, errors in ranks(2).call(prepare_a_pair, sequence_parallel):
        assert grown == 0
        assert wrong == []
        assert errors[0] == ("ValueError", "max_tokens is 0; it takes a positive integer")
        assert "Linear has no parallel layer" in errors[1][1]


@released
def exceed_what_was_prepared(rank: int, world_size: int) -> tuple[tuple[str, str], bool]:
    """Call a layer with more tokens than it was prepared for, while a stream is captured and then."""
    ctx, layer = context(), ColumnParallelLinear(context(), *SIZES[:2], sequence_parallel=True)
    prepare(layer, 8)
    x = draw(0, 8, SIZES[0])  # a rank's
    with torch.no_grad():
        with mock.patch.object(ctx.backend, "is_capturing", return_value=True):
            error = raised(layer, x)
        return error, len(layer(x)) == 8 * world_size


def test_more_tokens_than_were_prepared_are_refused_while_a_stream_is_captured(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), is_made_later in ranks(2).call(exceed_what_was_prepared):
        assert kind == "RuntimeError"
        assert "need memory that there is not yet, and a stream is being captured" in message
        assert "iris_tensor_parallel.prepare the model" in message
        assert is_made_later


def call_when_closed(rank: int, world_size: int) -> list[tuple[str, str]]:
    close_context()
    x = torch.ones(6, SIZES[0])
    with torch.no_grad():
        with iris(1 << 22, "cpu") as ctx:
            layer = ColumnParallelLinear(ctx, *SIZES[:2], sequence_parallel=True)
            layer(x[:4])
        return [raised(layer, x[:4]), raised(layer, x)]


def test_a_layer_says_that_its_context_was_closed(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).call(call_when_closed):
        for kind, message in errors:
            assert kind == "RuntimeError"
            assert "this context is closed; iris_core.iris makes another" in message


@released
def have_no_tokens(rank: int, world_size: int) -> tuple[tuple[str, str], bool]:
    # Of sizes that no other test has: of a product that was called before, the ranks would not meet to find it.
    layer = ColumnParallelLinear(context(), 12, 18, sequence_parallel=True)
    own = own_rows(draw(0, 1, 12), rank, world_size)
    return raised(layer, own), tuple(layer(own, tokens=1).shape) == (1, 18 // world_size)


def test_a_rank_without_tokens_is_every_ranks_error_unless_it_is_said(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), is_right in ranks(2).call(have_no_tokens):
        assert kind == "ValueError"
        assert "rank 1 has no tokens" in message
        assert "tokens=..." in message
        assert is_right


@released
def take_nothing(rank: int, world_size: int) -> list[Any]:
    """Of empty batches: the outputs' shapes, how many gradients are not zero or missing, and operators made."""
    ctx, (wide, hidden, narrow) = context(), SIZES
    shapes, gradients = [], []
    for sequence_parallel in (False, True):
        options: Any = {"sequence_parallel": sequence_parallel, "sequence_dim": 1}
        layers = [ColumnParallelLinear(ctx, wide, hidden, **options), RowParallelLinear(ctx, hidden, narrow, **options)]
        if not sequence_parallel:
            layers.append(ColumnParallelLinear(ctx, wide, hidden, gather_output=True))
        for layer in layers:
            for batch, length in ((0, 4), (3, 0)):
                x = torch.zeros(batch, length, layer.weight.shape[1], requires_grad=True)
                said = {"tokens": 0} if sequence_parallel and layer is layers[0] else {}
                output = layer(x, **said)
                output.sum().backward()
                shapes.append(tuple(output.shape))
                gradients += [one.grad.count_nonzero().item() for one in layer.parameters() if one.grad is not None]
                gradients.append(sum(one.grad is None for one in (x, *layer.parameters())))
    return [shapes, sum(gradients), len(ctx.operators)]


def test_nothing_is_made_of_no_tokens(ranks: Callable[[int], Ranks]) -> None:
    _, hidden, narrow = SIZES
    own = hidden // 2
    replicated = [(0, 4, own), (3, 0, own), (0, 4, narrow), (3, 0, narrow), (0, 4, hidden), (3, 0, hidden)]
    in_sequence = [(0, 8, own), (3, 0, own), (0, 2, narrow), (3, 0, narrow)]
    for shapes, not_zero, made in ranks(2).call(take_nothing):
        assert shapes == replicated + in_sequence
        assert (not_zero, made) == (0, 0)


@released
def have_different_numbers(rank: int, world_size: int) -> tuple[str, str]:
    layer = ColumnParallelLinear(context(), *SIZES[:2], sequence_parallel=True)
    return raised(layer, own_rows(draw(0, 3, SIZES[0]), rank, world_size))


def test_ranks_with_different_numbers_of_tokens_are_told_what_to_say(ranks: Callable[[int], Ranks]) -> None:
    for rank, (kind, message) in enumerate(ranks(2).call(have_different_numbers)):
        assert kind == "ValueError"
        assert f"column-parallel layer of 10 to 14 features, {[4, 2][rank]} tokens of all ranks: " in message
        assert "say how many all have together, tokens=..." in message


@released
def have_different_numbers_alike(rank: int, world_size: int) -> tuple[str, str]:
    """Of tokens that all ranks have alike, in debug mode."""
    ctx, layer = context(), RowParallelLinear(context(), *SIZES[1:])
    x = draw(0, 4, SIZES[1]).chunk(world_size, -1)[rank]
    with torch.no_grad():
        layer(x)
        ctx.debug_mode = True
        error = raised(layer, x[: 4 - rank])
        ctx.debug_mode = False
    return error


def test_in_debug_mode_ranks_with_different_numbers_of_tokens_are_told_at_once(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(have_different_numbers_alike):
        assert kind == "ValueError"
        assert "the layers the ranks call" in message
        assert "row-parallel layer of 14 to 6 features', 4, " in message
        assert "row-parallel layer of 14 to 6 features', 3, " in message


@released
def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    column = ColumnParallelLinear(ctx, *SIZES[:2], sequence_parallel=True)
    row = RowParallelLinear(ctx, *SIZES[1:], sequence_parallel=True, sequence_dim=1)
    places = ColumnParallelLinear(ctx, *SIZES[:2], sequence_parallel=True, sequence_dim=1)
    x, hidden = draw(0, 4, SIZES[0]), draw(1, 2, 3, SIZES[1]).chunk(world_size, -1)[rank]
    weight = torch.nn.Parameter(column.weight[1:].detach())
    return [
        raised(column, x[:, 1:]),
        raised(column, x[0]),
        raised(column, x.half()),
        raised(column, x, tokens=6),
        raised(row, hidden),
        raised(row, hidden[..., 1:]),
        raised(column.sharding, x, weight),
        raised(column.sharding, x, column.weight, column.bias[1:]),
        raised(ColumnParallelLinear(ctx, *SIZES[:2]), x, tokens=9),
        raised(ColumnParallelLinear, ctx, *SIZES[:2], sequence_parallel=True, gather_output=True),
        raised(ColumnParallelLinear.from_linear, ctx, torch.nn.Identity()),
        raised(RowParallelLinear(ctx, *SIZES[1:], sequence_parallel=True, sequence_dim=2), hidden),
        raised(ColumnParallelLinear, ctx, *SIZES[:2], variant="fastest", gather_output=True),
        raised(RowParallelLinear, ctx, *SIZES[1:], sequence_parallel=True, backward_variant="fastest"),
        raised(column_parallel_linear, ctx, x, weight, out_features=0),
        raised(pickle.dumps, column),
        raised(places, draw(2, 3, 2, SIZES[0]), tokens=9),
    ]


def test_what_does_not_fit_is_refused_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    parts = [
        "column-parallel layer of 10 to 14 features: x is (4, 9); it must be (…, 10)",
        "x is (10,)",
        "x is torch.float16 and weight torch.float32",
        "it must be (3, 10): the operator was made for N=14, K=10 and up to M=6",
        "all ranks have 6 tokens; where each place of a sequence has 2, its length must be a multiple of the 2 ranks",
        "row-parallel layer of 14 to 6 features: x is (2, 3, 6); it must be (…, 7)",
        "weight is (6, 10); this rank's must be (7, 10)",
        "bias is (6,); this rank's must be (7,)",
        "tokens is 9, but x has 4",
        "one of both",
        "a layer is a Identity; it must be a torch.nn.Linear",
        "sequence_dim is 2",
        "unknown variant 'fastest' of family 'gemm_all_scatter'",
        "unknown variant 'fastest' of family 'all_gather_gemm'",
        "out_features is 0",
        "save its state_dict()",
        "all ranks have 9 tokens; where each place of a sequence has 3, its length must be a multiple of the 2 ranks",
    ]
    for errors in ranks(2).call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == ("TypeError" if "state_dict" in part else "ValueError"), message
            assert part in message, message
