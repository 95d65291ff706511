"""Layers in bf16: outputs and gradients are off from the whole in fp32 by rounding alone, in every variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import draw, gradients, own_gradients, own_rows, parameters, released
from ranks import Ranks, context

from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@released
def train_in_bf16(rank: int, world_size: int, gathers: str, sums: str, sequence_parallel: bool) -> Any:
    """Two calls with other data; return what is off from the whole in fp32 by more than rounding to bf16 explains.

    Gathers and sums are the variants of either, where x is gathered; else all have that of the sums.
    """
    small = context().is_interpreted()
    tokens, width, features = (32, 48, 64) if small else (1024, 1024, 2048)
    torch.manual_seed(0)
    device, dtype = context().get_device(), torch.bfloat16
    rounded = [torch.nn.Linear(*sizes, device=device, dtype=dtype) for sizes in ((width, features), (features, width))]
    gathers = gathers if sequence_parallel else sums
    options = {"sequence_parallel": sequence_parallel}
    cut = (
        ColumnParallelLinear.from_linear(context(), rounded[0], variant=gathers, backward_variant=sums, **options),
        RowParallelLinear.from_linear(context(), rounded[1], variant=sums, backward_variant=gathers, **options),
    )
    whole = tuple(torch.nn.Linear(one.in_features, one.out_features, device=device) for one in rounded)
    for one, other in zip(parameters(whole), parameters(rounded), strict=True):
        one.data.copy_(other.data)
    off = []
    for seed in range(2):
        for one in parameters((*whole, *cut)):
            one.grad = None
        data = [draw(seed + 10 * which, tokens, width).to(dtype) for which in range(2)]
        expected = gradients(whole, *(one.float() for one in data))
        if sequence_parallel:
            data = [own_rows(one, rank, world_size) for one in data]
            expected = own_rows(expected[0], rank, world_size), own_rows(expected[1], rank, world_size)
        found = gradients(cut, *data)
        pairs = [*zip(found, expected, strict=True)]
        pairs += zip((one.grad for one in parameters(cut)), own_gradients(whole, cut), strict=True)
        off += [error for one, other in pairs if not (error := relative(one, other)) < 1e-2]
    return off


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("variant", "world_size"), [("workgroup_specialized:portable", 2), ("auto", 4)])
def test_layers_in_bf16_are_off_by_rounding(
    ranks: Callable[[int], Ranks], world_size: int, variant: str, sequence_parallel: bool
) -> None:
    assert ranks(world_size).call(train_in_bf16, variant, variant, sequence_parallel) == [[]] * world_size


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    "variants",
    [
        ("auto", "auto"),
        ("workgroup_specialized:portable", "workgroup_specialized:portable"),
        ("copy_engine:sm90", "warp_specialized:sm90"),
        ("workgroup_specialized:sm90", "warp_specialized:sm90"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_layers_in_bf16_are_off_by_rounding_on_gpus(
    ranks: Callable[[int], Ranks], world_size: int, variants: tuple[str, str], sequence_parallel: bool
) -> None:
    assert ranks(world_size).call(train_in_bf16, *variants, sequence_parallel) == [[]] * world_size
