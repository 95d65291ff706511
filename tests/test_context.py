"""The end of a context, and arguments that make no sense to it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from unittest import mock

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


def run_out_of_addresses(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Rank 1 cannot map the heap, then not the memory of reports."""
    close_context()
    errors = []
    for which in range(2):
        mapped = [mmap.mmap] * which + [mock.Mock(side_effect=OSError("no room for it"))] * (rank == 1)
        calls = iter(mapped + [mmap.mmap] * 2)
        with mock.patch("iris_core.shared_memory.mmap.mmap", lambda *args, calls=calls: next(calls)(*args)):
            errors.append(raised(iris, 1 << 20))
    return errors


def test_memory_that_one_rank_cannot_map_is_every_ranks_error(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(run_out_of_addresses)
    for peers, own in zip(first, second, strict=True):
        assert own[0] == "OSError"
        assert peers[0] == "PeerError"
        assert "rank 1 failed to map" in peers[1]
        assert "no room for it" in peers[1]
        assert "no room for it" in own[1]
