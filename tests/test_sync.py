"""Signals, waits and barriers between real ranks: what is announced has arrived, and every wait is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from families import FUSED, make_problem, name
from ranks import Ranks, context, raised

import iris_core
from iris_core import PeerError, RankPool
from overlap_taxonomy import Sync, Variant, get_variant

ROUNDS = 50
BLOCK = 256


@triton.jit
def send(letter_ptr, flag_ptr, number, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    iris_core.store(letter_ptr + offsets, offsets + number, rank, peer, heap_bases)
    iris_core.signal(iris_core.translate(flag_ptr, rank, peer, heap_bases), number)


@triton.jit
def receive(letter_ptr, flag_ptr, number, faults_ptr, watchdog_ptr, BLOCK: tl.constexpr):
    iris_core.wait(flag_ptr, number, watchdog_ptr)
    offsets = tl.arange(0, BLOCK)
    value = tl.load(letter_ptr + offsets)
    wrong = tl.sum((value != offsets + number).to(tl.int32))
    tl.store(faults_ptr, tl.load(faults_ptr) + wrong)


@triton.jit
def letters_kernel(
    letter_ptr, flag_ptr, faults_ptr, rank, heap_bases, watchdog_ptr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    peer = 1 - rank
    for number in range(1, ROUNDS + 1):
        if rank == 0:
            send(letter_ptr, flag_ptr, number, rank, peer, heap_bases, BLOCK)
        receive(letter_ptr, flag_ptr, number, faults_ptr, watchdog_ptr, BLOCK)
        if rank == 1:
            send(letter_ptr, flag_ptr, number, rank, peer, heap_bases, BLOCK)


def write_letters(rank: int, world_size: int) -> int:
    ctx = context()
    letter = ctx.zeros(BLOCK, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int64)
    faults = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    letters_kernel[(1,)](
        letter, flag, faults, rank, ctx.get_heap_bases(), ctx.get_watchdog(), ROUNDS=ROUNDS, BLOCK=BLOCK
    )
    ctx.barrier()
    assert flag.item() == ROUNDS
    found = int(faults.item())
    for buffer in (letter, flag, faults):
        ctx.free(buffer)
    ctx.barrier()
    return found


def test_a_signalled_letter_has_arrived_both_ways(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(write_letters) == [0, 0]


@triton.jit
def greet_kernel(words_ptr, number, rank, world_size, heap_bases):
    for peer in range(world_size):
        iris_core.store(words_ptr + rank, number, rank, peer, heap_bases)


def meet_often(rank: int, world_size: int) -> list[list[int]]:
    """Between two barriers a rank writes to all; after the second, it reads what all have written."""
    ctx = context()
    words = ctx.zeros(world_size, dtype=torch.int64)
    ctx.barrier()
    seen = []
    for number in range(20):
        greet_kernel[(1,)](words, number + rank, rank, world_size, ctx.get_heap_bases())
        ctx.device_barrier()
        seen.append(words.clone())  # in stream order
        ctx.device_barrier()
    ctx.barrier()
    ctx.free(words)
    return [one.tolist() for one in seen]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_device_barrier_orders_what_is_before_and_after(ranks: Callable[[int], Ranks], world_size: int) -> None:
    for seen in ranks(world_size).call(meet_often):
        assert seen == [[number + rank for rank in range(world_size)] for number in range(20)]


# Waits that fail: ranks of their own, which give up soon; fresh ones after a test that failed.


@pytest.fixture(scope="module")
def impatient_pools() -> Iterator[dict[str, RankPool]]:
    pools: dict[str, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def impatient(impatient_pools: dict[str, RankPool], device: str) -> Iterator[RankPool]:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pool = impatient_pools.get(device)
    if pool is None or not pool._processes:
        pool = impatient_pools[device] = RankPool(2, device, environment={"IRIS_TIMEOUT_S": "2"})
    yield pool
    if pool._processes:
        pool.call(mend)


def mend(rank: int, world_size: int) -> None:
    context().reset()


@triton.jit
def wait_kernel(flag_ptr, expected, watchdog_ptr):
    iris_core.wait(flag_ptr, expected, watchdog_ptr)


def wait_in_vain(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    flags = ctx.full((4,), 3, dtype=torch.int64)
    ctx.watchdog.watch(flags, lambda word: f"letter {word}")
    ctx.barrier()
    if rank == 0:
        wait_kernel[(1,)](flags[2:], 5, ctx.get_watchdog())
    return raised(ctx.barrier)


def test_a_wait_in_vain_names_the_flag_and_what_it_saw(impatient: RankPool) -> None:
    waiting, other = impatient.call(wait_in_vain)
    assert waiting[0] == "TimeoutError"
    for part in ("rank 0: program 0", "2 s", "letter 2", "at least 5", "saw 3", "IRIS_TIMEOUT_S", "reset()"):
        assert part in waiting[1]
    assert other == waiting


def meet_alone(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    if rank == 1:
        ctx.device_barrier()
    return raised(ctx.barrier)


def test_a_device_barrier_that_a_rank_misses_names_it(impatient: RankPool) -> None:
    for kind, message in impatient.call(meet_alone):
        assert kind == "TimeoutError"
        assert "rank 1: program 0" in message
        assert "rank 0 at a device barrier" in message


def call_alone(rank: int, world_size: int, family: str, variant: str) -> tuple[str, str]:
    ctx = context()
    problem = make_problem(family, 8, 8, 8, world_size, torch.float32)
    operator = get_variant(family, variant).build(ctx, problem)
    if rank == 0:
        a = torch.ones(problem.a_shape(rank), device=ctx.get_device())
        b = torch.ones(problem.b_shape(rank), device=ctx.get_device())
        operator(a, b)
    return raised(ctx.barrier)


# One whose programs wait, one whose stream does. The handshake's waits are the same in all.
@pytest.mark.parametrize("variant", [v for v in FUSED if v.name in ("fused_sequential", "copy_engine")], ids=name)
@pytest.mark.parametrize("device", ["cpu"])
def test_an_operator_that_a_rank_does_not_call_names_it(impatient: RankPool, variant: Variant) -> None:
    for kind, message in impatient.call(call_alone, variant.family, variant.name):
        assert kind == "TimeoutError"
        awaited = "rank 1 to be ready (its call has not started), flag ready[1], in call 1"
        if variant.sync is Sync.SHARD_FLAG:  # not numbered
            awaited = "part 0 of rank 1's shard"
        for part in (
            f"{variant.family}/{variant.name}: {awaited}: expected at least 1, saw 0",
            "rank 0: program",
            "2 s",
            "IRIS_TIMEOUT_S",
        ):
            assert part in message


def skip_a_barrier(rank: int, world_size: int) -> Any:
    ctx = context()
    return raised(ctx.barrier) if rank == 0 else None


@pytest.mark.parametrize("device", ["cpu"])
def test_a_host_barrier_that_a_rank_misses_names_it(impatient: RankPool) -> None:
    (kind, message), _ = impatient.call(skip_a_barrier)
    assert kind == PeerError.__name__
    assert "rank 1 did not answer within" in message
