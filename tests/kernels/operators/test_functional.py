"""Operators on demand: which operator a call takes, and how their memory is given back."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from checking import fault, make_data
from families import FAMILIES, make_problem
from ranks import Ranks, close_context, context, raised

from iris_core import iris
from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.gemm_all_reduce import gemm_all_reduce
from iris_kernels.gemm_all_scatter import gemm_all_scatter
from iris_kernels.gemm_reduce_scatter import gemm_reduce_scatter

pytestmark = pytest.mark.parametrize("device", ["cpu"])
DTYPE = torch.bfloat16
CALLS: dict[str, tuple[Callable[..., Any], str]] = {  # and the dimensions that ranks have parts of
    "gemm_all_scatter": (gemm_all_scatter, "n"),
    "all_gather_gemm": (all_gather_gemm, "mn"),
    "gemm_reduce_scatter": (gemm_reduce_scatter, "k"),
    "gemm_all_reduce": (gemm_all_reduce, "k"),
}


def call_with_sizes(rank: int, world_size: int, family: str, cut: str) -> list[str | None]:
    """Call with sizes of which most ranks hold as much, and once more; return what is wrong."""
    ctx = context()
    call = CALLS[family][0]
    wrong = []
    for size in (9, 10, 9):  # on four ranks 3, 3, 3, 0 and 3, 3, 3, 1
        sizes = {"m": 12, "n": 20, "k": 16} | {cut: size}
        problem = make_problem(family, *sizes.values(), world_size, DTYPE)
        data = make_data(family, problem, rank, size, ctx.get_device())
        wrong.append(fault(call(ctx, data.a, data.b, **{cut: size}), data, DTYPE))
    return wrong


@pytest.mark.parametrize(("family", "cut"), [(family, cut) for family in FAMILIES for cut in CALLS[family][1]])
def test_sizes_that_a_rank_cannot_tell_apart(ranks: Callable[[int], Ranks], family: str, cut: str) -> None:
    assert ranks(4).call(call_with_sizes, family, cut) == [[None] * 3] * 4


def refuse(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    a, b = torch.ones(4, 6, dtype=DTYPE), torch.ones(6, 5, dtype=DTYPE)
    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (a, b, {"n": 11}),
        (a, b, {"config": {"block_m": 16}}),
        (np.ones((4, 6)), b, {}),
        (a, [[1.0]], {}),
    ]
    refused = [raised(gemm_all_scatter, ctx, first, second, **options) for first, second, options in calls]
    without: Any = None
    return [*refused, raised(gemm_all_scatter, without, a, b)]


def test_arguments_that_make_no_sense_are_refused(ranks: Callable[[int], Ranks]) -> None:
    parts = [["n is 11", "10"], ["config is a dict", "GemmConfig"], ["A is a ndarray", "Tensor"], ["B is a list"]]
    parts.append(["ctx is a NoneType", "iris_core.iris()"])
    for errors in ranks(2).call(refuse):
        for (kind, message), expected in zip(errors, parts, strict=True):
            assert kind == "ValueError"
            assert all(part in message for part in expected), message


def run_out_of_heap(rank: int, world_size: int) -> tuple[int, int, tuple[str, str]]:
    close_context()
    ctx = iris(1 << 20)
    free = ctx.heap.allocator.free_bytes

    def call_with_longer_and_longer_sums() -> None:
        for k in range(1, 1000):
            gemm_all_scatter(ctx, torch.ones(128, k, dtype=DTYPE), torch.ones(k, 128, dtype=DTYPE))

    error = raised(call_with_longer_and_longer_sums)
    made = len(ctx.operators)
    ctx.release_operators()
    left = free - ctx.heap.allocator.free_bytes
    data = make_data("gemm_all_scatter", make_problem("gemm_all_scatter", 9, 9, 9, 2, DTYPE), rank, 0, ctx.get_device())
    assert fault(gemm_all_scatter(ctx, data.a, data.b), data, DTYPE) is None
    ctx.close()
    return made, left, error


def test_operators_give_their_memory_back(ranks: Callable[[int], Ranks]) -> None:
    for made, left, (kind, message) in ranks(2).call(run_out_of_heap):
        assert made > 10
        assert left == 0
        assert kind == "HeapExhausted"
        assert f"{made} operators are kept" in message
        assert "release_operators" in message


def release_what_was_captured(rank: int, world_size: int) -> tuple[tuple[str, str], int, int]:
    ctx, a, b = context(), torch.ones(8, 4), torch.ones(4, 8)
    ctx.release_operators()
    gemm_all_reduce(ctx, a, b)
    with mock.patch.object(ctx.backend, "is_capturing", return_value=True):
        gemm_all_reduce(ctx, a, b)
    error, kept = raised(ctx.release_operators), len(ctx.operators)
    ctx.release_operators(captured=True)
    return error, kept, len(ctx.operators)


def test_what_graphs_may_use_is_not_released(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), kept, left in ranks(2).call(release_what_was_captured):
        assert (kind, kept, left) == ("RuntimeError", 1, 0)
        assert "captured CUDA graphs use the memory of gemm_all_reduce/" in message
        assert "release_operators(captured=True)" in message


N, K, MOST = 40, 24, 100


def call_any_rows(rank: int, world_size: int, family: str, seed: int) -> tuple[list[str | None], int, int, int]:
    """Call with many numbers of rows; return what is wrong, operators, and the heap beside what the largest takes."""
    close_context()
    ctx, wrong, used = iris(1 << 24), [], []
    draws = random.Random(seed)
    for lengths in ([draws.randint(1, MOST) for _ in range(12)], [MOST]):
        before = ctx.heap.allocator.used_bytes
        for number, m in enumerate(lengths):
            problem = make_problem(family, m, N, K, world_size, DTYPE)
            data = make_data(family, problem, rank, seed + number, ctx.get_device())
            sizes = {name: size for name, size in (("m", m), ("n", N), ("k", K)) if name in CALLS[family][1]}
            wrong.append(fault(CALLS[family][0](ctx, data.a, data.b, **sizes), data, DTYPE))
        used.append(ctx.heap.allocator.used_bytes - before)
        made = len(ctx.operators)
        ctx.release_operators()
    close_context()
    ctx.close()
    return wrong, made, *used


@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_rows_is_one_operator(ranks: Callable[[int], Ranks], family: str) -> None:
    """It grows by a quarter or more, so its buffers are hardly larger than those of the largest call alone."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for wrong, made, used, of_the_largest in ranks(2).call(call_any_rows, family, seed):
        assert wrong == [None] * 13
        assert made == 1
        assert 0 < used <= 1.3 * of_the_largest


def count_meetings(rank: int, world_size: int, family: str, variant: str) -> list[list[str]]:
    """Return what the ranks' hosts tell each other in calls of fewer rows than before."""
    ctx, met = context(), []
    function, names = CALLS[family]
    for m in (MOST, 50, 33, 70):
        problem = make_problem(family, m, N, K, world_size, DTYPE)
        data = make_data(family, problem, rank, m, ctx.get_device())
        sizes = {name: size for name, size in (("m", m), ("n", N), ("k", K)) if name in names}
        with mock.patch.object(ctx.control_plane, "all_gather", side_effect=ctx.control_plane.all_gather) as gather:
            output = function(ctx, data.a, data.b, variant=variant, **sizes)
        met.append([call.args[1] for call in gather.call_args_list])
        assert fault(output, data, DTYPE) is None
    return met


@pytest.mark.parametrize("variant", ["auto", "workgroup_specialized:portable"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_number_of_rows_takes_no_meeting(ranks: Callable[[int], Ranks], family: str, variant: str) -> None:
    for first, *later in ranks(2).call(count_meetings, family, variant):
        assert first
        assert later == [[], [], []]


def grow_without_room(rank: int, world_size: int) -> tuple[list[int], tuple[str, str], bool]:
    """Grow where there is room for the call but not for more, then where there is none, then where there is much."""
    close_context()
    ctx, most = iris(1 << 20), []

    def call(m: int) -> torch.Tensor:
        output = gemm_all_scatter(ctx, torch.ones(m, 8, dtype=DTYPE), torch.ones(8, 128, dtype=DTYPE))
        most.append(next(iter(ctx.operators.values())).problem.m)
        return output

    for m in (1900, 1910):
        call(m)
    error = raised(call, 4000)
    is_right = bool((call(1905) == 8).all())
    ctx.release_operators()
    for m in (400, 450):
        call(m)
    ctx.close()
    return most, error, is_right


def test_an_operator_that_cannot_grow_stays_as_it_is(ranks: Callable[[int], Ranks]) -> None:
    for most, (kind, message), is_right in ranks(2).call(grow_without_room):
        assert most == [1900, 1910, 1910, 400, 500]
        assert kind == "HeapExhausted"
        assert re.match(r"gemm_all_scatter of \d+x\d+x\d+, with room for 1910 rows: symmetric heap exhausted", message)
        assert "1 operators are kept" in message
        assert is_right


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_and_layers_take_the_fastest_unless_told(family: str, device: str) -> None:
    assert inspect.signature(CALLS[family][0]).parameters["variant"].default == "auto"
