"""Many calls of one operator, with ranks that come late and no barrier between the calls but the handshake."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from checking import fault, make_data
from families import FUSED, make_problem, name
from limits import wait_until
from ranks import Ranks, context

from iris_kernels.common.config import GemmConfig
from overlap_taxonomy import Variant, get_variant

# On GPUs, test_gpu.py has what there is time to compile.
pytestmark = pytest.mark.parametrize("device", ["cpu"])
CALLS = 100  # of one variant a family; of the others a fifth, and twice as many on GPUs (test_gpu.py)
each_fused_variant = pytest.mark.parametrize("variant", FUSED, ids=name)


def call_often(rank: int, world_size: int, family: str, variant: str, seed: int) -> list[str]:
    ctx = context()
    problem = make_problem(family, 5, 9, 4, world_size, torch.bfloat16)
    config = GemmConfig(16, 16, 16, num_warps=4, num_sms=2, comm_sms=1, descriptors=False)
    operator = get_variant(family, variant).build(ctx, problem, config)
    late = random.Random(seed)  # the same on every rank: who is late, and when
    faults = []
    for call in range(CALLS if variant == "fused_sequential:portable" else CALLS // 5):
        data = make_data(family, problem, rank, seed + call, ctx.get_device())
        who, before, after = late.randrange(4 * world_size), late.random() * 2e-3, late.random() * 2e-3
        if who == rank:
            time.sleep(before)
        output = operator(data.a, data.b)
        if who == rank:
            time.sleep(after)  # the peers' next calls must not touch the output until it is read
        if wrong := fault(operator.as_matrix(output.clone()), data, problem.dtype):
            faults.append(f"call {call}, rank {rank}: {wrong}")
    operator.close()
    return faults


@each_fused_variant
def test_every_call_is_right_when_ranks_come_late(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert ranks(2).call(call_often, variant.family, variant.name, seed) == [[], []]


def read_late(rank: int, world_size: int, family: str, variant: str) -> str | None:
    ctx = context()
    problem = make_problem(family, 40, 70, 33, world_size, torch.float16)
    operator = get_variant(family, variant).build(ctx, problem)
    first = make_data(family, problem, rank, 1, ctx.get_device())
    second = make_data(family, problem, rank, 2, ctx.get_device())
    calling = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    output = operator(first.a, first.b)
    last = world_size - 1
    if rank == last:
        wait_until(lambda: int(ctx.peer_view(calling).sum()) >= last)  # all peers are about to call again
        time.sleep(0.1)
        faults = [fault(output.clone(), first, problem.dtype)]
    else:
        faults = [fault(output.clone(), first, problem.dtype)]
        calling.fill_(1)
    output = operator(second.a, second.b)
    faults.append(fault(output.clone(), second, problem.dtype))
    ctx.free(calling)
    operator.close()
    return next((f"call {call + 1}: {wrong}" for call, wrong in enumerate(faults) if wrong), None)


@each_fused_variant
def test_an_output_is_kept_until_its_rank_calls_again(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    """The peers are in their second call long before the last rank reads the output of the first: ready before push."""
    assert ranks(3).call(read_late, variant.family, variant.name) == [None] * 3


def call_two_operators_in_turn(rank: int, world_size: int, family: str, variant: str) -> list[str]:
    ctx = context()
    faults = []
    problems = [make_problem(family, m, 34, 5, world_size, torch.float32) for m in (3, 40)]
    operators = [get_variant(family, variant).build(ctx, problem) for problem in problems]
    for call in range(6):
        problem, operator = problems[call % 2], operators[call % 2]
        data = make_data(family, problem, rank, call, ctx.get_device())
        if wrong := fault(operator(data.a, data.b).clone(), data, problem.dtype):
            faults.append(f"call {call}: {wrong}")
    for operator in operators:
        operator.close()
    return faults


@each_fused_variant
def test_operators_do_not_disturb_each_other(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(2).call(call_two_operators_in_turn, variant.family, variant.name) == [[], []]


def count_heap(rank: int, world_size: int, family: str, variant: str) -> tuple[int, int]:
    ctx = context()
    before = ctx.heap.allocator.used_bytes
    for _ in range(3):
        problem = make_problem(family, 5, 9, 4, world_size, torch.float32)
        get_variant(family, variant).build(ctx, problem).close()
    return before, ctx.heap.allocator.used_bytes


@each_fused_variant
def test_a_closed_operator_leaves_nothing_on_the_heap(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    for before, after in ranks(2).call(count_heap, variant.family, variant.name):
        assert before == after
