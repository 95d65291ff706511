"""Layers in fp8: outputs and gradients beside exact ones of what was quantised, and beside torch's own products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import draw, far, own_rows, parameters, released
from ranks import Ranks, context, raised
from torch import nn
from torch_compiling import compiled, each_backend

from iris_kernels.common.quantise import quantise_rows
from iris_kernels.common.scales import dequantised, quantise
from iris_tensor_parallel import (
    ColumnParallelLinear,
    Float8,
    MergedColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linear,
    load_whole,
    prepare,
    row_parallel_linear,
    share_gathers,
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
    """Return in fp64 what the x of all ranks stands for, each rank's features quantised by themselves if they are cut."""
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
    # As torch would: its own products of each rank's part, in bf16, and their sum.
    cuts = [slice(None)] if layer_type is ColumnParallelLinear else [slice(*one) for one in _cuts(WIDTH, world_size)]
    total = torch.zeros(TOKENS, FEATURES, dtype=torch.bfloat16)
    for cut in cuts:
        small, own_scale = quantise_rows(x[:, cut], E4M3, scale)
        rows, columns = own_scale.expand(TOKENS, 1).contiguous(), of_weight.expand(FEATURES, 1).t().contiguous()
        total += torch._scaled_mm(small, weight[:, cut].contiguous().t(), rows, columns, out_dtype=torch.bfloat16)
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
