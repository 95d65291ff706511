"""A whole model's weights in one whose layers are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import SIZES, draw, far, released
from ranks import Ranks, context, raised

from iris_tensor_parallel import (
    ColumnParallelLinear,
    Float8,
    MergedColumnParallelLinear,
    RowParallelLinear,
    load_whole,
)

pytestmark = pytest.mark.parametrize("device", ["cpu"])


@released
def load_whole_weights(rank: int, world_size: int) -> list[Any]:
    ctx, (wide, hidden, narrow) = context(), SIZES
    torch.manual_seed(0)
    names = {
        "up": torch.nn.Linear(wide, hidden),
        "norm": torch.nn.LayerNorm(hidden),
        "down": torch.nn.Linear(hidden, narrow),
    }
    whole = torch.nn.ModuleDict(names | {name: torch.nn.Linear(wide, 4) for name in ("query", "key")})
    state = whole.state_dict()
    for name in ("weight", "bias"):
        state[f"merged.{name}"] = torch.cat([state.pop(f"{one}.{name}") for one in ("query", "key")])
    results = []
    for device in ("cpu", "meta"):
        cut = torch.nn.ModuleDict(
            {
                "up": ColumnParallelLinear(ctx, wide, hidden, device=device),
                "norm": torch.nn.LayerNorm(hidden, device=device),
                "down": RowParallelLinear(ctx, hidden, narrow, device=device),
                "merged": MergedColumnParallelLinear(ctx, wide, (4, 4), device=device),
            }
        )
        load_whole(cut, state, assign=device == "meta")
        x = draw(1, 3, wide)
        merged = cut["merged"].split(cut["merged"](x))
        expected = [whole[name](x).chunk(world_size, -1)[rank] for name in ("query", "key")]
        between = whole["up"](x)
        found = [cut["up"](x), cut["down"](between.chunk(world_size, -1)[rank]), cut["norm"](between), *merged]
        expected = [between.chunk(world_size, -1)[rank], whole["down"](between), whole["norm"](between), *expected]
        results.append(far(found, expected))
        results.append([name for name, one in cut.named_parameters() if one.untyped_storage().nbytes() != one.nbytes])
    own = cut["up"].state_dict()
    missing = {name: tensor for name, tensor in state.items() if not name.startswith("norm")}
    return [results, raised(load_whole, cut["up"], own), raised(load_whole, cut, missing)]


@released
def load_under_two_names(rank: int, world_size: int) -> list[Any]:
    """Return which parameters are not those of layers made of whole ones: of one under two names, and in fp8."""
    ctx, how = context(), Float8("tensor")
    torch.manual_seed(0)
    linear, other = (torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16) for _ in range(2))
    other.weight.data *= 5.0
    merged = MergedColumnParallelLinear.from_linears(ctx, [linear, other], quantize=how)
    layers = [ColumnParallelLinear.from_linear(ctx, linear), merged]
    expected = {name: one.clone() for name, one in torch.nn.ModuleList(layers).state_dict().items()}
    for one in layers:
        one.weight.data.zero_()
    weight = linear.weight.detach()
    both = torch.cat([weight, other.weight.detach()])
    load_whole(torch.nn.ModuleList([*layers, layers[0]]), {"0.weight": weight, "1.weight": both, "2.weight": weight})
    state = torch.nn.ModuleList(layers).state_dict()
    return [name for name, one in expected.items() if not torch.equal(one.float(), state[name].float())]


def test_layers_under_two_names_and_merged_ones_in_fp8_are_loaded(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(load_under_two_names) == [[]] * 2


def test_a_whole_models_weights_are_loaded(ranks: Callable[[int], Ranks]) -> None:
    for results, (kind, message), (_, missing) in ranks(2).call(load_whole_weights):
        assert results == [[]] * 4
        assert kind == "ValueError"
        assert "weight is (7, 10); the whole layer's is (14, 10)" in message
        assert "norm.weight" in missing
