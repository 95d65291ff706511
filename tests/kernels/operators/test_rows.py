"""Operators that are called with other numbers of rows than they were made for, another one each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import fault, make_data, poison
from families import FUSED, VARIANTS, make_problem, name
from ranks import Ranks, context, raised

from iris_kernels.common.config import GemmConfig
from iris_kernels.common.problem import plan_rows
from overlap_taxonomy import Variant, get_variant

on_cpu = pytest.mark.parametrize("device", ["cpu"])
DTYPE = torch.bfloat16
MOST, N, K = 70, 38, 36
TILES = GemmConfig(16, 16, 16, num_warps=4, num_sms=3, comm_sms=1, row_chunks=2, descriptors=False)


def call_with_rows(
    rank: int, world_size: int, family: str, variant: str, seed: int, own: bool
) -> tuple[list[str], int]:
    """Call an operator with random numbers of rows; return what was wrong, and by how much the heap has grown."""
    ctx = context()
    config = TILES if own and get_variant(family, variant).has_kernels else None
    operator = get_variant(family, variant).build(ctx, make_problem(family, MOST, N, K, world_size, DTYPE), config)
    used = ctx.heap.allocator.used_bytes
    draw = random.Random(seed)
    faults = []
    for call, m in enumerate([1, MOST, *(draw.randint(1, MOST) for _ in range(3)), 2]):
        problem = make_problem(family, m, N, K, world_size, DTYPE)
        data = make_data(family, problem, rank, seed + call, ctx.get_device())
        poison(operator)
        if wrong := fault(operator.as_matrix(operator(data.a, data.b, m=m)), data, DTYPE):
            faults.append(f"call {call} of {m} rows: {wrong}")
    grown = ctx.heap.allocator.used_bytes - used
    operator.close()
    return faults, grown


@on_cpu
@pytest.mark.parametrize(
    ("world_size", "own"), [(3, True), (3, False), (1, True)], ids=["small tiles", "planned", "small tiles, alone"]
)
@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_any_number_of_rows_is_right_without_more_memory(
    ranks: Callable[[int], Ranks], variant: Variant, world_size: int, own: bool
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    results = ranks(world_size).call(call_with_rows, variant.family, variant.name, seed, own)
    assert results == [([], 0)] * world_size


@on_cpu
@pytest.mark.parametrize("variant", [one for one in VARIANTS if one.is_baseline], ids=name)
def test_baselines_take_any_number_of_rows(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(2).call(call_with_rows, variant.family, variant.name, 5, False) == [([], 0)] * 2


def refuse_rows(rank: int, world_size: int, m: int | None) -> tuple[str, str]:
    ctx = context()
    operator = get_variant("all_gather_gemm", "workgroup_specialized:portable").build(
        ctx, make_problem("all_gather_gemm", 8, 8, 8, world_size, DTYPE)
    )
    a, b = torch.ones(3, 8, dtype=DTYPE), torch.ones(8, 4, dtype=DTYPE)
    error = raised(operator, a, b, m=m)
    operator.close()
    return error


@on_cpu
@pytest.mark.parametrize(("m", "words"), [(None, "give m"), (9, "takes 1 to 8"), (0, "takes 1 to 8"), (8, "must be")])
def test_rows_that_do_not_fit_are_refused(ranks: Callable[[int], Ranks], m: Any, words: str) -> None:
    for kind, message in ranks(2).call(refuse_rows, m):
        assert kind == "ValueError"
        assert words in message


@pytest.mark.parametrize("most", [1, 100, 8192])
def test_plans_are_few_and_for_as_many_rows_or_more(most: int) -> None:
    planned = [plan_rows(m, most) for m in range(1, most + 1)]
    assert all(m <= rows <= min(most, m + m // 8) for m, rows in enumerate(planned, 1))
    assert planned[-1] == most
    assert len(set(planned)) <= 128 + 16 * max(0, (most - 1).bit_length() - 7)
