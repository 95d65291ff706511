"""The end of a context, and arguments that make no sense to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, close_context, context, raised

from iris_core import iris
from iris_kernels.gemm_all_scatter import gemm_all_scatter

pytestmark = pytest.mark.parametrize("device", ["cpu"])


def close_twice(rank: int, world_size: int, users_group: bool) -> list[tuple[str, str]]:
    close_context()
    ctx = iris(1 << 20)
    output = gemm_all_scatter(ctx, torch.ones(4, 4), torch.ones(4, 4), variant="library")
    assert output.eq(4).all()
    tensor = ctx.zeros(4)
    if users_group:
        dist.destroy_process_group()  # as a user does who thinks that it is his
    ctx.close()
    ctx.close()
    operator = next(iter(ctx.operators.values()))
    uses = [
        (ctx.zeros, 4),
        (ctx.free, tensor),
        (ctx.barrier,),
        (ctx.check,),
        (ctx.reset,),
        (ctx.agree, "this", 1),
        (operator, torch.ones(4, 4), torch.ones(4, 4)),
        (ctx.release_operators,),
    ]
    return [raised(*use) for use in uses]


@pytest.mark.parametrize("users_group", [False, True])
def test_a_closed_context_says_that_it_is(ranks: Callable[[int], Ranks], users_group: bool) -> None:
    pool = ranks(2)
    for errors in pool.call(close_twice, users_group):
        assert {kind for kind, _ in errors} == {"RuntimeError"}
        assert all("this context is closed" in message for _, message in errors)
    assert pool.call(open_and_close) == [4, 4]


def open_and_close(rank: int, world_size: int) -> int:
    ctx = iris(1 << 20)
    size = len(ctx.ones(4))
    ctx.close()
    return size


def ask_for_nonsense(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    errors = [raised(ctx.zeros, -1), raised(ctx.zeros, 4, dtype="float")]
    close_context()
    return [*errors, raised(iris, 1 << 60, device="cpu")]


def test_sizes_and_dtypes_that_make_no_sense(ranks: Callable[[int], Ranks]) -> None:
    for shape, dtype, heap in ranks(2).call(ask_for_nonsense):
        assert shape == ("ValueError", "shape is (-1,); no length may be negative")
        assert dtype[0] == "ValueError"
        assert "'float'" in dtype[1]
        assert f"{1 << 60:,} bytes a rank, which iris(heap_size=...)" in heap[1]
