"""Layers in fp8: outputs and gradients beside exact ones of what was quantised, and beside torch's own products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from layers import draw, far, own_rows, parameters, released
from ranks import Ranks, context, raised
from torch import nn
from torch_compiling import compiled, if_it_compiles

from iris_kernels.common.fp8.quantise import quantise_rows
from iris_kernels.common.fp8.scales import dequantised, quantise
from iris_tensor_parallel import (
    ColumnParallelLinear,
    Float8,
    RowParallelLinear,
    column_parallel_linear,
    load_whole,
    prepare,
    row_parallel_linear,
)

pytestmark = pytest.mark.parametrize("device", ["cpu"])
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDTH, FEATURES, TOKENS = 72, 42, 12  # of three ranks not all have as many features of a row-parallel layer
BF16 = 2**-9  # of a number, what rounding it to bf16 changes at most
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gathers tokens": (ColumnParallelLinear, {"sequence_parallel": True}),
    "gathers nothing": (ColumnParallelLinear, {}),
    "gathers features": (ColumnParallelLinear, {"gather_output": True}),
    "scatters": (RowParallelLinear, {"sequence_parallel": True}),
    "reduces": (RowParallelLinear, {}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def whole_layer(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return the same layer on every rank, of output features of different sizes."""
    torch.manual_seed(seed)
    linear = nn.Linear(WIDTH, FEATURES, **options)
    with torch.no_grad():
        linear.weight *= 1 + torch.arange(FEATURES)[:, None] % 5
    return linear.to(dtype)


def tokens(seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same tokens on every rank, of different sizes."""
    return (draw(seed, TOKENS, WIDTH) * (1 + torch.arange(TOKENS)[:, None] % 7)).to(dtype)


def own_x(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what this rank gives its layer of all tokens."""
    rank, world_size = context().get_rank(), context().get_num_ranks()
    if isinstance(layer, RowParallelLinear):
        return x[:, layer.sharding.shard(x.shape[1])].contiguous()
    return own_rows(x, rank, world_size) if layer.sharding.sequence_parallel else x


def own_output(layer: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return what this rank's layer gives of the whole output."""
    if isinstance(layer, RowParallelLinear):
        is_cut = layer.sharding.sequence_parallel
        return own_rows(whole, context().get_rank(), context().get_num_ranks()) if is_cut else whole
    return whole if layer.sharding.gather_output else whole[:, layer.sharding.shard(whole.shape[1])]


def in_fp8(x: torch.Tensor, scale: torch.Tensor | None = None, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Return in fp64 what rows stand for once they are quantised, by a scale each or a given one."""
    if scale is None:
        return dequantised(*quantise(x, dtype, "row")).double()
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype).double() * scale.double()


def parts_in_fp8(layer: Any, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return in fp64 what the x of all ranks stands for, ranks' features quantised by themselves if they are cut."""
    if not isinstance(layer, RowParallelLinear):
        return in_fp8(x, scale)
    return torch.cat([in_fp8(part, scale) for part in x.chunk(context().get_num_ranks(), 1)], 1)


@released
def infer(rank: int, world_size: int, kind: str, how: Float8, static: bool) -> tuple[list[Any], list[Any], str]:
    """Return how far outputs are from exact ones, and how much further than torch's own."""
    (layer_type, options), linear = KINDS[kind], whole_layer(dtype=torch.bfloat16).requires_grad_(False)
    x = tokens(dtype=torch.bfloat16)
    if static:
        linear.input_scale = torch.tensor(0.05)
    layer = layer_type.from_linear(context(), linear, quantize=how, **options)
    scale = linear.input_scale if static else None
    weight, of_weight = quantise(linear.weight, E4M3, how.weight_scales)
    wide_x, wide_weight = parts_in_fp8(layer, x, scale), dequantised(weight, of_weight).double()
    exact = wide_x @ wide_weight.t() + linear.bias.double()
    with torch.no_grad():
        output = layer(own_x(layer, x))
    # As torch would: products of each rank's part in bf16, and their sum.
    cuts = [slice(None)] if layer_type is ColumnParallelLinear else [slice(*one) for one in _cuts(WIDTH, world_size)]
    total = torch.zeros(TOKENS, FEATURES, dtype=torch.bfloat16)
    for cut in cuts:
        small, own_scale = quantise_rows(x[:, cut], E4M3, scale)
        total += (dequantised(small, own_scale) @ dequantised(weight[:, cut], of_weight).t()).bfloat16()
    total += linear.bias
    norm = torch.linalg.vector_norm
    ours, theirs = (norm(own_output(layer, exact) - one.double()) for one in (output, own_output(layer, total)))
    worse = [] if ours <= 1.2 * theirs else [(float(ours), float(theirs))]
    return far([output.double()], [own_output(layer, exact)], limit=2 * BF16), worse, str(output.dtype)


def _cuts(size: int, world_size: int) -> list[tuple[int, int]]:
    each = -(-size // world_size)
    return [(min(rank * each, size), min((rank + 1) * each, size)) for rank in range(world_size)]


@each_kind
@pytest.mark.parametrize(
    ("how", "static"), [(Float8(), False), (Float8("tensor", use_fast_accum=True), False), (Float8("tensor"), True)]
)
def test_outputs_are_those_of_what_was_quantised(
    ranks: Callable[[int], Ranks], kind: str, how: Float8, static: bool
) -> None:
    assert ranks(3).call(infer, kind, how, static) == [([], [], "torch.bfloat16")] * 3


@released
def train(rank: int, world_size: int, kind: str) -> list[Any]:
    """Return how far an output and gradients are from exact ones of what was quantised."""
    (layer_type, options), linear = KINDS[kind], whole_layer()
    linear.input_scale = torch.tensor(1.0)  # which is not used
    layer = layer_type.from_linear(context(), linear, quantize=Float8(training=True), **options)
    x, grad = tokens(), draw(2, TOKENS, FEATURES) * (1 + torch.arange(TOKENS)[:, None] % 3)
    leaf = own_x(layer, x).clone().requires_grad_()
    output = layer(leaf)
    output.backward(own_output(layer, grad).contiguous())
    is_row = layer_type is RowParallelLinear
    # A rank quantises its own parts: of a weight whose input features are cut, and of gradients of output features.
    cuts = [slice(*one) for one in _cuts(WIDTH if is_row else FEATURES, world_size)]
    weight = linear.weight.detach()
    wide_x = parts_in_fp8(layer, x)
    if is_row:
        forward = torch.cat([in_fp8(weight[:, cut]) for cut in cuts], 1)
        of_x = in_fp8(grad, dtype=E5M2) @ in_fp8(weight.t()).t()
        whole_grad = in_fp8(grad, dtype=E5M2) if layer.sharding.sequence_parallel else grad.double()
    else:
        forward = in_fp8(weight)
        of_x = sum(in_fp8(grad[:, cut], dtype=E5M2) @ in_fp8(weight[cut].t()).t() for cut in cuts)
        whole_grad = grad.double()
    exact = own_output(layer, wide_x @ forward.t() + linear.bias.double())
    of_weight, of_bias = layer.sharding.own_weight(whole_grad.t() @ wide_x), layer.sharding.own_bias(whole_grad.sum(0))
    found = [output.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]
    expected = [exact, own_x(layer, of_x), of_weight, of_bias]
    # Where nothing is communicated, torch multiplies, and gives bf16.
    by_torch = {"gathers nothing": (0,), "reduces": (1,)}.get(kind, ())
    limits = [2 * BF16 if number in by_torch else 1e-5 for number in range(4)]
    pairs = zip(found, expected, limits, strict=True)
    return [far([one.double()], [to], limit=limit) for one, to, limit in pairs]


@each_kind
def test_gradients_are_those_of_what_was_quantised(ranks: Callable[[int], Ranks], kind: str) -> None:
    assert ranks(3).call(train, kind) == [[[], [], [], []]] * 3


class Pair(nn.Module):
    """A column-parallel and a row-parallel layer in fp8, with a residual and a norm behind them where none trains."""

    def __init__(self, how: Float8, sequence_parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        up, down = nn.Linear(WIDTH, FEATURES, dtype=torch.bfloat16), nn.Linear(FEATURES, WIDTH, dtype=torch.bfloat16)
        options: dict[str, Any] = {"quantize": how, "sequence_parallel": sequence_parallel}
        self.up = ColumnParallelLinear.from_linear(context(), up, activation="gelu", **options)
        self.down = RowParallelLinear.from_linear(context(), down, **options)
        self.norm = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, hidden = self.down(self.up(x * 2), x, norm_weight=self.norm)
        return normed + hidden


@released
def compile_pair(rank: int, world_size: int, backend: str, sequence_parallel: bool) -> tuple[list[Any], int]:
    """Return how far compiled pairs are from themselves without the compiler, and how many graphs there are."""
    wrong, graphs = [], 0
    for how in (Float8(), Float8(training=True)):
        pair = Pair(how, sequence_parallel)
        step = compiled(pair, backend)
        torch._dynamo.utils.counters.clear()
        for seed in range(2):
            x = draw(seed, TOKENS, WIDTH).bfloat16()
            x = own_rows(x, rank, world_size) if sequence_parallel else x

            def run(fn: Callable[..., Any], x: torch.Tensor = x, how: Float8 = how, pair: Any = pair) -> list[Any]:
                pair.zero_grad()
                leaf = x.clone().requires_grad_(how.training)
                with torch.set_grad_enabled(how.training):
                    output = fn(leaf)
                if not how.training:
                    return [output]
                output.square().sum().backward()
                return [output.detach(), leaf.grad, *[one.grad.clone() for one in parameters([pair])]]

            # Inductor keeps fp32 between bf16 operations, so what is quantised differs: by a step of e4m3 here and
            # there, 2**-4 of a number, and of e5m2 in gradients, 2**-3.
            wrong += far(run(step), run(pair), limit=1e-5 if backend == "aot_eager" else 4e-2)
        graphs += torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return wrong, graphs


def test_layers_are_part_of_a_whole_graph(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(compile_pair, "aot_eager", False) == [([], 2)] * 2


@if_it_compiles
def test_a_graph_of_layers_is_right_where_steps_are_merged(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(compile_pair, "inductor", True) == [([], 2)] * 2


@released
def be_prepared(rank: int, world_size: int, how: Float8, sequence_parallel: bool) -> tuple[int, int]:
    """Return how much the heap, and the number of operators, grew after `prepare`."""
    ctx, pair = context(), Pair(how, sequence_parallel)
    prepare(pair, TOKENS, gradients=how.training)
    used, made = ctx.heap.allocator.used_bytes, len(ctx.operators)
    for tokens in (TOKENS, 4):
        x = draw(0, tokens, WIDTH).bfloat16()
        x = own_rows(x, rank, world_size) if sequence_parallel else x
        with torch.set_grad_enabled(how.training):
            output = pair.down(pair.up(x.clone().requires_grad_(how.training)))
        if how.training:
            output.sum().backward()
    return ctx.heap.allocator.used_bytes - used, len(ctx.operators) - made


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("how", [Float8("tensor"), Float8(training=True)], ids=str)
def test_nothing_is_made_after_prepare(ranks: Callable[[int], Ranks], how: Float8, sequence_parallel: bool) -> None:
    assert ranks(2).call(be_prepared, how, sequence_parallel) == [(0, 0)] * 2


@released
def load(rank: int, world_size: int) -> tuple[list[int], tuple[str, str]]:
    """Return which of what is so of checkpoints is not, and what a wider weight is told."""
    ctx, whole, x = context(), whole_layer(dtype=torch.bfloat16), tokens(dtype=torch.bfloat16)
    found, quantize = [], Float8()
    for layer_type in (ColumnParallelLinear, RowParallelLinear):
        made = layer_type.from_linear(ctx, whole, quantize=quantize)
        drawn, meta = (layer_type(ctx, WIDTH, FEATURES, quantize=quantize, device=to) for to in (None, "meta"))
        with torch.no_grad():
            expected = made(own_x(made, x))
            drawn.bias.data, meta.bias.data = drawn.bias.bfloat16(), meta.bias.bfloat16()
            names = ["bias", "weight", "weight_scale"]
            found += [sorted(made.state_dict()) == names, made.weight.dtype == E4M3, not made.weight.requires_grad]
            # Whole weights, which are quantised, and such as are already.
            small, scale = quantise(whole.weight.detach(), E4M3, "row")
            quantised = {"weight": small, "weight_scale": scale, "bias": whole.bias.detach()}
            for state in (whole.state_dict(), quantised):
                for one in drawn.parameters():
                    one.zero_()
                load_whole(drawn, state)
                found += [torch.equal(drawn(own_x(made, x)), expected)]
            load_whole(meta, whole.state_dict(), assign=True)
            found += [torch.equal(meta(own_x(made, x)), expected)]
            drawn.load_state_dict(made.state_dict())
            found += [torch.equal(drawn(own_x(made, x)), expected)]
            torch.manual_seed(7)
            again = layer_type(ctx, WIDTH, FEATURES, quantize=quantize)
            torch.manual_seed(7)
            drawn.reset_parameters()
            found += [torch.equal(drawn.weight_scale, again.weight_scale)]
            found += [torch.equal(drawn.weight.float(), again.weight.float())]
    wide = ColumnParallelLinear.from_linear(ctx, whole).state_dict()
    made = ColumnParallelLinear.from_linear(ctx, whole, quantize=quantize)
    return [number for number, is_so in enumerate(found) if not is_so], raised(made.load_state_dict, wide)


def test_checkpoints_have_weights_and_scales(ranks: Callable[[int], Ranks]) -> None:
    for wrong, (kind, message) in ranks(2).call(load):
        assert wrong == []
        assert kind == "ValueError"
        assert "weight is torch.bfloat16, and the layer's is torch.float8_e4m3fn; load_whole quantises" in message


class Float8Tensor(torch.Tensor):
    """What is read of torchao's class of this name: the data, the scale, and the dtype that it seems to have."""

    qdata: torch.Tensor
    scale: torch.Tensor


@released
def take_quantised(rank: int, world_size: int) -> list[Any]:
    """Return which layers, quantised by others, differ from those that are quantised here."""
    ctx, x, wide = context(), tokens(dtype=torch.bfloat16), whole_layer(dtype=torch.bfloat16)
    with torch.no_grad():
        expected, found = ColumnParallelLinear.from_linear(ctx, wide, quantize=Float8())(x), []
    small, scale = quantise(wide.weight.detach(), E4M3, "row")
    with torch.no_grad():
        for shape in ((FEATURES, 1), (FEATURES,)):
            linear: Any = copy.deepcopy(wide)
            linear.weight = nn.Parameter(small, requires_grad=False)
            linear.weight_scale = scale.reshape(shape)
            linear.forward = lambda x: x  # of its own, as such layers have
            found.append(ColumnParallelLinear.from_linear(ctx, linear, quantize=Float8())(x))
        linear = copy.deepcopy(wide)
        linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Float8Tensor), requires_grad=False)
        linear.weight.qdata, linear.weight.scale = small, scale
        found.append(ColumnParallelLinear.from_linear(ctx, linear, quantize=Float8())(x))
        weight, of_weight, bias = (one.chunk(world_size)[rank] for one in (small, scale, wide.bias))
        found.append(column_parallel_linear(ctx, x, weight, bias, weight_scale=of_weight, quantize=Float8()))
        part = small[:, slice(*_cuts(WIDTH, world_size)[rank])]
        how = {"weight_scale": scale, "quantize": Float8()}
        row = RowParallelLinear.from_linear(ctx, wide, quantize=Float8())
        output = row_parallel_linear(ctx, own_x(row, x), part.contiguous(), wide.bias, **how)
        found += [output - row(own_x(row, x)) + 1]
        expected = [expected] * 4 + [torch.ones(TOKENS, FEATURES, dtype=torch.bfloat16)]
    return far(found, expected)


def test_weights_may_come_quantised(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(take_quantised) == [[]] * 2


@released
def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx, wide, x = context(), whole_layer(dtype=torch.bfloat16), tokens(dtype=torch.bfloat16)
    small, scale = quantise(wide.weight.detach(), E4M3, "row")
    bare: Any = copy.deepcopy(wide)
    bare.weight = nn.Parameter(small, requires_grad=False)
    blocks, other, own = copy.deepcopy(bare), copy.deepcopy(bare), copy.deepcopy(wide)
    blocks.weight_scale = torch.ones(1, 1).expand(2, 1)
    other.weight = nn.Parameter(small.float().to(torch.float8_e4m3fnuz), requires_grad=False)
    other.weight_scale = scale
    own.forward = lambda x: x
    make = ColumnParallelLinear.from_linear
    layer, trained = make(ctx, wide, quantize=Float8()), make(ctx, wide, quantize=Float8(training=True))
    spoilt = copy.deepcopy(layer).bfloat16()
    half = small[: FEATURES // 2]
    errors = [
        raised(Float8, "column"),
        raised(Float8, "tensor", training=True),
        raised(make, ctx, bare),
        raised(make, ctx, bare, quantize=Float8()),
        raised(make, ctx, bare, quantize=Float8(training=True)),
        raised(make, ctx, blocks, quantize=Float8()),
        raised(make, ctx, other, quantize=Float8()),
        raised(make, ctx, own, quantize=Float8()),
        raised(layer, x.clone().requires_grad_()),
        raised(column_parallel_linear, ctx, x, half, quantize=Float8()),
        raised(column_parallel_linear, ctx, x, half, weight_scale=torch.ones(3, 1), quantize=Float8()),
        raised(column_parallel_linear, ctx, x, half, weight_scale=torch.ones(3, 1)),
        raised(column_parallel_linear, ctx, x, half),
        raised(trained.sharding, x, trained.weight, input_scale=torch.ones(())),
    ]
    with torch.no_grad():
        errors += [
            raised(spoilt, x),
            raised(layer.sharding, x, layer.weight, weight_scale=layer.weight_scale, input_scale=torch.ones(2)),
        ]
    with mock.patch.object(ctx.backend, "arch", return_value="sm_80"):
        errors.append(raised(make, ctx, wide, quantize=Float8()))
    return errors


def test_what_does_not_fit_is_named(ranks: Callable[[int], Ranks]) -> None:
    parts = [
        "weight_scales is 'column'; it takes row or tensor",
        "weight_scales is 'tensor'; in training it takes row",
        "a layer's weight is a Parameter of torch.float8_e4m3fn, and quantize is None; fp8 weights take",
        "a layer's weight is torch.float8_e4m3fn, and it has no weight_scale",
        "quantize is Float8(weight_scales='row', training=True, use_fast_accum=False); fp8 weights take",
        "a layer's weight_scale is (2, 1); for 42 output features it takes one for all, (), or (42, 1)",
        "a layer's weight is torch.float8_e4m3fnuz, and cpu multiplies torch.float8_e4m3fn and torch.float8_e5m2",
        "a layer is a Linear, with a forward of its own",
        "an operand requires a gradient, and none is computed beside a weight in torch.float8_e4m3fn",
        "weight is torch.float8_e4m3fn, and weight_scale is None",
        "weight_scale is (3, 1), torch.float32; it takes torch.float32 of shape (), (1,), (21, 1)",
        "weight_scale is given, and quantize is None; it goes with quantize=Float8()",
        "weight is torch.float8_e4m3fn, and quantize is None; fp8 weights take quantize=Float8()",
        "input_scale is given, and quantize is Float8(weight_scales='row', training=True, use_fast_accum=False)",
        "weight is torch.bfloat16; with quantize=Float8(weight_scales='row', training=False, use_fast_accum=False)",
        "input_scale is (2,), torch.float32; it takes torch.float32 of shape (), (1,)",
        "quantize is given, and sm_80 multiplies no fp8: compute capability 8.9 and later",
    ]
    for errors in ranks(2).call(refuse):
        for (kind, message), part in zip(errors, parts, strict=True):
            assert kind == "ValueError", message
            assert part in message, message
