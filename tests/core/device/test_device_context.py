"""Context objects in kernels: what the loose functions do, interpreted and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context

import iris_core
import iris_core.gluon
from iris_core import iris
from iris_core.checker import check

ON_CPU = pytest.mark.parametrize("device", ["cpu"])
HEAP_BYTES = 1 << 20


@triton.jit
def pass_round(ctx, own_ptr, found_ptr, words_ptr, state_ptr):
    """Load what the next rank has, store, put and copy to the one before, and change its words."""
    ctx.barrier(state_ptr)
    lanes = tl.arange(0, 8)
    mask = lanes < 6
    after, before = (ctx.rank + 1) % ctx.world_size, (ctx.rank + ctx.world_size - 1) % ctx.world_size
    tl.store(found_ptr + lanes, ctx.load(own_ptr + lanes, after, mask=mask, other=-1))
    ctx.get(own_ptr + lanes, found_ptr + 8 + lanes, after, mask=mask)
    ctx.store(found_ptr + 16 + lanes, tl.load(own_ptr + lanes), before, mask=mask)
    ctx.put(own_ptr + lanes, found_ptr + 24 + lanes, before, mask=mask)
    ctx.copy(own_ptr + lanes, found_ptr + 32 + lanes, after, before, mask=mask)
    ctx.atomic_add(words_ptr, 5, before)
    ctx.atomic_sub(words_ptr + 1, 5, before)
    ctx.atomic_xchg(words_ptr + 2, 5, before)
    ctx.atomic_and(words_ptr + 3, 5, before)
    ctx.atomic_or(words_ptr + 4, 5, before)
    ctx.atomic_xor(words_ptr + 5, 5, before)
    ctx.atomic_min(words_ptr + 6, 5, before)
    ctx.atomic_max(words_ptr + 7, 5, before)
    ctx.atomic_cas(words_ptr + 8, 6, 5, before)
    tl.store(ctx.translate(words_ptr + 9, before), 5)
    ctx.signal(words_ptr + 10, 1, before)
    ctx.wait(words_ptr + 10, 1)


@triton.jit(do_not_specialize=["rank"])
def round_kernel(context_tensor, own_ptr, found_ptr, words_ptr, state_ptr, rank, world_size):
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size)
    pass_round(ctx, own_ptr, found_ptr, words_ptr, state_ptr)


@triton.jit
def constant_round_kernel(
    context_tensor, own_ptr, found_ptr, words_ptr, state_ptr, rank: tl.constexpr, world_size: tl.constexpr
):
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size)
    pass_round(ctx, own_ptr, found_ptr, words_ptr, state_ptr)


def go_round(ctx: Any, kernel: Any) -> None:
    rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
    own = ctx.arange(8, dtype=torch.int32).add_(10 * rank)
    found = ctx.full((40,), -2, dtype=torch.int32)
    words = ctx.full((11,), 6, dtype=torch.int64)
    state = ctx.zeros(world_size + 1, dtype=torch.int64)
    words[10] = 0
    ctx.barrier()
    kernel[(1,)](ctx.get_device_context(), own, found, words, state, rank, world_size)
    ctx.barrier()
    after = 10 * ((rank + 1) % world_size)
    second = 10 * ((rank + 2) % world_size)  # what the next rank has copied here
    for row, begin, masked in ((0, after, -1), (1, after, -2), (2, after, -2), (3, after, -2), (4, second, -2)):
        assert found[8 * row : 8 * row + 8].tolist() == [*range(begin, begin + 6), masked, masked], row
    assert words.tolist() == [11, 1, 5, 4, 7, 3, 5, 6, 5, 5, 1]
    for buffer in (state, words, found, own):
        ctx.free(buffer)
    ctx.barrier()


def go_round_on_rank(rank: int, world_size: int, is_constant: bool) -> None:
    go_round(context(), constant_round_kernel if is_constant else round_kernel)


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_object_reaches_the_ranks_it_names(
    ranks: Callable[[int], Ranks], world_size: int, is_constant: bool
) -> None:
    ranks(world_size).call(go_round_on_rank, is_constant)


def go_round_checked(rank: int, world_size: int, is_constant: bool) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    go_round(ctx, constant_round_kernel if is_constant else round_kernel)
    ctx.close()


@pytest.mark.parametrize("is_constant", [False, True])
def test_an_object_is_checked(is_constant: bool) -> None:
    report = check(go_round_checked, 3, args=(is_constant,), schedules=2)
    assert report.ok, report


@triton.jit(do_not_specialize=["rank"])
def send_kernel(context_tensor, data_ptr, flag_ptr, out_ptr, rank, world_size, HOW: tl.constexpr):
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size)
    lanes = tl.arange(0, 16)
    if rank == 0:
        ctx.store(data_ptr + lanes, lanes + 1, 1)
        if HOW == "relaxed":
            ctx.atomic_xchg(flag_ptr, 1, 1, sem="relaxed")
        else:
            ctx.signal(flag_ptr, 1, 1)
    else:
        if HOW != "no wait":
            ctx.wait(flag_ptr, 1)
        tl.store(out_ptr + lanes, tl.load(data_ptr + lanes))


def send(rank: int, world_size: int, how: str) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    data, flag = ctx.zeros(16, dtype=torch.int32), ctx.zeros(1, dtype=torch.int64)
    out = torch.zeros(16, dtype=torch.int32)
    ctx.barrier()
    send_kernel[(1,)](ctx.get_device_context(), data, flag, out, rank, world_size, how)
    ctx.close()


def test_races_of_an_object_are_found() -> None:
    assert check(send, 2, args=("signal",)).ok
    assert check(send, 2, args=("relaxed",)).races
    assert check(send, 2, args=("no wait",)).races


@triton.jit(do_not_specialize=["rank"])
def poll_kernel(context_tensor, flag_ptr, rank, world_size):
    """Program 0 polls, through the heap, what program 1 writes: no call says that it does."""
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size)
    if tl.program_id(0) == 0:
        while ctx.load(flag_ptr, rank, volatile=True) < 1:
            pass
    else:
        ctx.atomic_xchg(flag_ptr, 1, rank)


@triton.jit(do_not_specialize=["rank"])
def lonely_kernel(context_tensor, flag_ptr, rank, world_size):
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size)
    while ctx.load(flag_ptr + 1, rank) < 1:
        pass


def poll_for_nobody(rank: int, world_size: int) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    flags = ctx.zeros(2, dtype=torch.int64)
    lonely_kernel[(1,)](ctx.get_device_context(), flags, rank, world_size)


def test_a_poll_for_nothing_names_the_flag() -> None:
    """And not where the object reads the addresses of the heaps, which the loop finds unchanged as well."""
    (deadlock,) = check(poll_for_nobody, 1, schedules=1).deadlocks
    assert "waits for byte 8 of (2,) of torch.int64, on rank 0's heap" in deadlock


def poll(rank: int, world_size: int) -> int:
    ctx = context()
    flag = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    poll_kernel[(2,)](ctx.get_device_context(), flag, rank, world_size)
    found = int(flag)
    ctx.free(flag)
    return found


@ON_CPU
def test_a_loop_that_polls_through_an_object_gives_others_their_turn(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(poll) == [1, 1]


def describe(rank: int, world_size: int) -> tuple[list[int], bool]:
    ctx = context()
    words = ctx.get_device_context().tolist()
    expected = [rank, world_size, *ctx.get_heap_bases().tolist(), ctx.get_watchdog().data_ptr()]
    return words, words[:-1] == expected  # the last is where the trace is


def test_a_context_tensor_begins_as_in_iris(ranks: Callable[[int], Ranks]) -> None:
    """Rank, number of ranks, bases of the heaps: kernels that were written for Iris may read it themselves."""
    for rank, (words, is_expected) in enumerate(ranks(2).call(describe)):
        assert words[:2] == [rank, 2]
        assert is_expected
