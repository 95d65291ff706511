"""Operators on GPUs: large and ragged, called in a hurry with ranks held up on the device, captured in a graph.

Kernels are compiled for every dtype, world size and divisibility of the sizes: few cases, chosen to differ in these.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from checking import Data, fault, make_data, poison
from families import GPU_FUSED, GPU_VARIANTS, make_problem, name
from ranks import Ranks, context

from iris_kernels.common.operator import Operator
from overlap_taxonomy import Variant, get_variant

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["cuda"])]

WORLD_SIZES = [1, 2, 4, 8]
CALLS = 200
LONGEST_DELAY = 1_000_000  # cycles, half a millisecond


@dataclass(frozen=True)
class Case:
    """Sizes of the whole; rows may be a number a rank."""

    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nk"
    rows_a_rank: bool = False


RAGGED = Case(4091, 5120, 1024, rows_a_rank=True)
MANY = [
    RAGGED,
    Case(8192, 8192, 8192),
    Case(2048, 2048, 2048, torch.float16, "kn"),
    Case(301, 318, 1088),  # tiles that reach past the end of a rank's rows and columns, on 16 bytes
    Case(5, 5, 512),  # fewer rows and columns than some ranks' share
    Case(33, 37, 41, torch.float16),  # through pointers: rows are not on 16 bytes
    Case(200, 300, 100, torch.bfloat16, "strided"),
    Case(200, 300, 100, torch.float32),
]


def run_cases(rank: int, world_size: int, family: str, variant: str, cases: list[Case]) -> list[str]:
    """Call one operator a case, twice with other data; return what was wrong."""
    ctx = context()
    torch.backends.cuda.matmul.allow_tf32 = False
    # The vendor's split sums may be rounded to bf16 on the way, by default: right for a user, too rough for the bound.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    faults = []
    for case in cases:
        m = case.m * world_size if case.rows_a_rank else case.m
        problem = make_problem(family, m, case.n, case.k, world_size, case.dtype)
        if get_variant(family, variant).unsupported_reason(problem, None):
            continue
        operator = get_variant(family, variant).build(ctx, problem)
        for call in range(2):
            data = make_data(family, problem, rank, call, ctx.get_device(), layout=case.layout)
            poison(operator)
            ctx.barrier()
            output = operator.as_matrix(operator(data.a, data.b))
            if wrong := fault(output, data, case.dtype):
                faults.append(f"{case}, rank {rank}: {wrong}")
        operator.close()
    return faults


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("variant", GPU_VARIANTS, ids=name)
def test_output_is_right(ranks: Callable[[int], Ranks], variant: Variant, world_size: int) -> None:
    most = max(size for size in WORLD_SIZES if size <= max(1, torch.cuda.device_count()))
    cases = MANY if world_size == most else [RAGGED]
    assert ranks(world_size).call(run_cases, variant.family, variant.name, cases) == [[]] * world_size


def make_operator(rank: int, world_size: int, family: str, variant: str, size: int) -> tuple[Operator, list[Data]]:
    """Return a square operator and several calls' data."""
    ctx = context()
    problem = make_problem(family, size, size, size, world_size, torch.bfloat16)
    data = [make_data(family, problem, rank, seed, ctx.get_device()) for seed in range(8)]
    return get_variant(family, variant).build(ctx, problem), data


def check(operator: Operator, outputs: list[torch.Tensor], expected: list[Data]) -> list[str]:
    context().barrier()
    faults = [fault(operator.as_matrix(out), data, out.dtype) for out, data in zip(outputs, expected, strict=True)]
    operator.close()
    return [f"call {call}: {wrong}" for call, wrong in enumerate(faults) if wrong]


def call_often(rank: int, world_size: int, family: str, variant: str, seed: int) -> list[str]:
    """Queue all calls at once. A device is held up before some calls, and after them before the output is read."""
    operator, data = make_operator(rank, world_size, family, variant, 512)
    late = random.Random(seed)  # the same on every rank: who is late, and when
    outputs = []
    for call in range(CALLS):
        who, before, after = (
            late.randrange(2 * world_size),
            late.randrange(LONGEST_DELAY),
            late.randrange(LONGEST_DELAY),
        )
        now = data[call % len(data)]
        if who == rank:
            torch.cuda._sleep(before)
        output = operator(now.a, now.b)
        if who == rank:
            torch.cuda._sleep(after)
        outputs.append(output.clone())
    return check(operator, outputs, [data[call % len(data)] for call in range(CALLS)])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("variant", GPU_FUSED, ids=name)
def test_every_call_is_right_when_devices_come_late(
    ranks: Callable[[int], Ranks], variant: Variant, world_size: int
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert ranks(world_size).call(call_often, variant.family, variant.name, seed) == [[]] * world_size


def replay(rank: int, world_size: int, family: str, variant: str) -> list[str]:
    """Capture one call; replay it with other inputs, with ordinary calls between."""
    ctx = context()
    operator, data = make_operator(rank, world_size, family, variant, 1024)
    a, b = data[0].a.clone(), data[0].b.t().clone().t()
    for _ in range(2):  # compile, and load every module
        operator(a, b)
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = operator(a, b)
    ctx.barrier()
    outputs, expected = [], []
    for call in range(24):
        now = data[call % len(data)]
        if call % 6 == 5:
            result = operator(now.a, now.b)
        else:
            a.copy_(now.a)
            b.copy_(now.b)
            graph.replay()
            result = output
        outputs.append(result.clone())
        expected.append(now)
    return check(operator, outputs, expected)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("variant", GPU_FUSED, ids=name)
def test_a_captured_call_can_be_replayed(ranks: Callable[[int], Ranks], variant: Variant, world_size: int) -> None:
    assert ranks(world_size).call(replay, variant.family, variant.name) == [[]] * world_size
