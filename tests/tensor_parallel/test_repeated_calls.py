"""What a call of a layer finds again of one before it: features and dtypes are checked once, for any tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from layers import SIZES, draw, far, own_rows, released, whole_pair
from ranks import Ranks, context, raised

from iris_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from iris_tensor_parallel.sharding.base import Sharding

pytestmark = pytest.mark.parametrize("device", ["cpu"])
TOKENS = 8


@released
def repeat_calls(rank: int, world_size: int, bias: bool) -> Any:
    """Return what is wrong, how often calls were checked, and what is said of an x of another dtype, by layer."""
    ctx, found = context(), []
    for number, kind in enumerate((ColumnParallelLinear, RowParallelLinear)):
        whole = whole_pair(bias=bias)[number]
        layer: Any = kind.from_linear(ctx, whole, sequence_parallel=True)
        xs = [draw(seed, TOKENS, SIZES[number]) for seed in range(3)] + [draw(3, 2 * TOKENS, SIZES[number])]

        def of_rank(tensor: torch.Tensor, *, is_input: bool, number: int = number) -> torch.Tensor:
            if is_input == (number == 0):  # a column-parallel layer's x and a row-parallel one's output
                return own_rows(tensor, rank, world_size)
            return tensor.chunk(world_size, 1)[rank].contiguous()

        with (
            torch.no_grad(),
            mock.patch.object(Sharding, "_checked", autospec=True, side_effect=Sharding._checked) as checked,
        ):
            outputs, counts = [], []
            for x in xs:
                outputs.append(layer(of_rank(x, is_input=True)))
                counts.append(checked.call_count)
            error = raised(layer, of_rank(xs[0], is_input=True).double())
            ctx.release_operators(captured=True)
            outputs.append(layer(of_rank(xs[0], is_input=True)))
            with torch.enable_grad():
                layer(of_rank(xs[0], is_input=True))
        expected = [of_rank(whole(x), is_input=False) for x in [*xs, xs[0]]]
        found.append((far(outputs, expected), counts, "x is torch.float64" in error[1], checked.call_count))
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_features_and_dtypes_that_were_checked_are_not_checked_again(ranks: Callable[[int], Ranks], bias: bool) -> None:
    assert ranks(2).call(repeat_calls, bias) == [[([], [1, 1, 1, 1], True, 3)] * 2] * 2


@released
def repeat_with_misfits(rank: int, world_size: int) -> Any:
    """Return what layers say of tokens and residuals that do not fit, and give of no tokens, behind a call that did."""
    ctx, said = context(), []
    column, row = whole_pair()
    gathering: Any = ColumnParallelLinear.from_linear(ctx, column, sequence_parallel=True)
    alone: Any = ColumnParallelLinear.from_linear(ctx, column)
    scattering: Any = RowParallelLinear.from_linear(ctx, row, sequence_parallel=True)
    whole = draw(0, TOKENS, 2, SIZES[1]).chunk(world_size, -1)[rank].contiguous()
    own = draw(1, TOKENS // world_size, 2, SIZES[2])
    x = draw(2, TOKENS // world_size, 2, SIZES[0])
    with torch.no_grad():
        for _ in range(2):
            scattering(whole, own)
            gathering(x)
        said.append(raised(scattering, whole, own.movedim(0, 1))[1])
        said.append(raised(scattering, whole, own[1:])[1])
        said.append(raised(scattering, whole[1:])[1])
        said.append(raised(scattering, whole, own.double())[1])
        said.append(raised(gathering, x, 2 * TOKENS + 1)[1])
        said.append(raised(alone, x[0], 1)[1])
        said.append(raised(gathering, x[:0])[1])
        said.append(raised(gathering, x[:, :0], 5)[1])
        empty = gathering(x[:0], 0), scattering(whole[:0], own[:0]), alone(x[0][:0])
    return said, [tuple(one.shape) for one in empty]


def test_what_depends_on_the_tokens_is_checked_each_time(ranks: Callable[[int], Ranks]) -> None:
    expected = [
        "residual is (2, 4, 6); it must be (4, 2, 6)",
        "residual is (3, 2, 6); it must be (4, 2, 6)",
        "its length must be a multiple of the 2 ranks",
        "residual torch.float64; they must be the same",
        "tokens is 17; of x (4, 2, 10) each place has 2",
        "tokens is 1, but x has 2, which all ranks have alike",
        "has no tokens; where ranks have different numbers",
        "A is (0, 10) on rank",
    ]
    for said, empty in ranks(2).call(repeat_with_misfits):
        assert [found for found, what in zip(said, expected, strict=True) if what not in found] == []
        assert empty == [(0, 2, 7), (0, 2, 6), (0, 7)]
