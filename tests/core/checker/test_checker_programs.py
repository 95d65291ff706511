"""Small programs that are right, and that a checker could take for wrong; and what a check leaves behind."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

import iris_core
from iris_core.checker import check

HEAP_BYTES = 1 << 21


@triton.jit
def wait_for_many_kernel(flags_ptr, watchdog_ptr, COUNT: tl.constexpr):
    for index in range(COUNT):
        iris_core.wait(flags_ptr + index, 1, watchdog_ptr)


def wait_for_many(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(HEAP_BYTES)
    flags = ctx.ones(200, dtype=torch.int64)
    ctx.barrier()
    wait_for_many_kernel[(1,)](flags, ctx.get_watchdog(), 200)
    ctx.barrier()
    ctx.close()


@triton.jit
def wait_in_a_circle_kernel(flags_ptr, rank, heap_bases, watchdog_ptr):
    iris_core.wait(flags_ptr, 1, watchdog_ptr)
    iris_core.signal(iris_core.translate(flags_ptr, rank, 1 - rank, heap_bases), 1)


def wait_in_a_circle(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(HEAP_BYTES)
    flags = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    wait_in_a_circle_kernel[(1,)](flags, rank, ctx.get_heap_bases(), ctx.get_watchdog())
    ctx.barrier()


@triton.jit
def add_to_some_kernel(words_ptr, COUNT: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    there = lanes - (lanes == 0).to(tl.int64) * (1 << 44)  # the first one's place is no memory
    tl.atomic_add(words_ptr + there, 1, mask=lanes > 0)


def add_to_some(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(HEAP_BYTES)
    words = ctx.zeros(8, dtype=torch.int64)
    ctx.barrier()
    add_to_some_kernel[(1,)](words, 8)
    assert words.tolist() == [0] + [1] * 7
    ctx.barrier()
    ctx.close()


@triton.jit
def poll_one_of_some_kernel(words_ptr, COUNT: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    seen = tl.atomic_add(words_ptr + lanes, 0, mask=lanes == 0)
    while tl.sum(tl.where(lanes == 0, seen, 0)) == 0:
        seen = tl.atomic_add(words_ptr + lanes, 0, mask=lanes == 0)


def poll_one_of_some(rank: int, world_size: int) -> None:
    """Nobody sets the first word; the others are not looked at."""
    ctx = iris_core.iris(HEAP_BYTES)
    words = ctx.ones(8, dtype=torch.int64)
    words[0] = 0
    ctx.barrier()
    poll_one_of_some_kernel[(1,)](words, 8)
    ctx.barrier()


@triton.jit
def announce_between_kernel(data_ptr, record_ptr, rank, heap_bases, BLOCK: tl.constexpr):
    there = iris_core.translate(record_ptr, rank, 1, heap_bases)
    tl.store(iris_core.translate(data_ptr, rank, 1, heap_bases) + tl.arange(0, BLOCK), 7)
    iris_core.signal(there + 1, 1)
    tl.store(there + 2 * tl.arange(0, 2), 5)  # on both sides of the flag


@triton.jit
def read_after_kernel(data_ptr, record_ptr, out_ptr, watchdog_ptr, BLOCK: tl.constexpr):
    iris_core.wait(record_ptr + 1, 1, watchdog_ptr)
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(data_ptr + tl.arange(0, BLOCK)))


def announce_between(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(HEAP_BYTES)
    data, record, out = ctx.zeros(8), ctx.zeros(4, dtype=torch.int64), ctx.zeros(8)
    ctx.barrier()
    if rank == 0:
        announce_between_kernel[(1,)](data, record, rank, ctx.get_heap_bases(), 8)
    else:
        read_after_kernel[(1,)](data, record, out, ctx.get_watchdog(), 8)
    ctx.barrier()
    ctx.close()


@triton.jit
def fill_kernel(data_ptr, value, rank, owner, heap_bases, BLOCK: tl.constexpr):
    tl.store(iris_core.translate(data_ptr, rank, owner, heap_bases) + tl.arange(0, BLOCK), value)


def read_a_sum(rank: int, world_size: int, reads: bool) -> None:
    """The host of rank 0 reads what was made of the kernel's output, and only then lets rank 1 write there."""
    ctx = iris_core.iris(HEAP_BYTES)
    data = ctx.zeros(16)
    ctx.barrier()
    if rank == 0:
        fill_kernel[(1,)](data, 3.0, rank, 0, ctx.get_heap_bases(), 16)
        total = (2 * data.sum()).view(1)
        ctx.broadcast(float(total.item()) if reads else 96.0, 0)
    else:
        assert ctx.broadcast(None, 0) == 96.0
        fill_kernel[(1,)](data, 5.0, rank, 0, ctx.get_heap_bases(), 16)
    ctx.barrier()
    ctx.close()


@triton.jit
def count_in_kernel(data_ptr, count_ptr, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    iris_core.store(data_ptr + offsets, 1.0, rank, peer, heap_bases)
    tl.debug_barrier()
    iris_core.atomic_add(count_ptr, 1, rank, peer, heap_bases, sem="release")


@triton.jit
def read_when_counted_kernel(data_ptr, count_ptr, out_ptr, expected, watchdog_ptr, BLOCK: tl.constexpr):
    iris_core.wait(count_ptr, expected, watchdog_ptr)
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(data_ptr + tl.arange(0, BLOCK)))


def wait_for_some_programs(rank: int, world_size: int, expected: int, reader: int) -> None:
    ctx = iris_core.iris(HEAP_BYTES)
    data, out, count = ctx.zeros(64), ctx.zeros(64), ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    if rank == reader:
        read_when_counted_kernel[(1,)](data, count, out, expected, ctx.get_watchdog(), 64)
    else:
        count_in_kernel[(4,)](data, count, rank, reader, ctx.get_heap_bases(), 16)
    ctx.barrier()
    ctx.close()


@triton.jit
def exchange_twice_kernel(
    data_ptr, flags_ptr, out_ptr, rank, heap_bases, watchdog_ptr, READY: tl.constexpr, RESET: tl.constexpr
):
    """Send to the peer in two rounds, in the second once it has read what came in the first, if `READY`."""
    lanes, peer = tl.arange(0, 16), 1 - rank
    for number in range(1, 3):
        value = 1 if RESET else number
        iris_core.store(data_ptr + lanes, lanes + number, rank, peer, heap_bases)
        iris_core.signal(iris_core.translate(flags_ptr, rank, peer, heap_bases), value)
        iris_core.wait(flags_ptr, value, watchdog_ptr)
        tl.store(out_ptr + lanes, tl.load(data_ptr + lanes))
        if RESET:
            tl.debug_barrier()
            tl.atomic_xchg(flags_ptr, 0, sem="relaxed", scope="sys")
        if READY:
            tl.debug_barrier()
            iris_core.signal(iris_core.translate(flags_ptr + 1, rank, peer, heap_bases), number)
            iris_core.wait(flags_ptr + 1, number, watchdog_ptr)


def exchange_twice(rank: int, world_size: int, ready: bool, reset: bool) -> None:
    ctx = iris_core.iris(HEAP_BYTES)
    data, flags = ctx.zeros(16, dtype=torch.int64), ctx.zeros(2, dtype=torch.int64)
    ctx.barrier()
    out = torch.zeros(16, dtype=torch.int64)
    exchange_twice_kernel[(1,)](data, flags, out, rank, ctx.get_heap_bases(), ctx.get_watchdog(), ready, reset)
    ctx.barrier()
    ctx.close()


@triton.jit
def read_often_kernel(word_ptr, flag_ptr, out_ptr, rank, heap_bases, watchdog_ptr, COUNT: tl.constexpr):
    if rank == 0:
        total = tl.load(word_ptr)
        for _ in range(COUNT):
            total += tl.load(word_ptr)
        tl.store(out_ptr, total)
        iris_core.signal(iris_core.translate(flag_ptr, 0, 1, heap_bases), 1)
    else:
        iris_core.wait(flag_ptr, 1, watchdog_ptr)


def read_often(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(HEAP_BYTES)
    word, flag = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    out = torch.zeros(1, dtype=torch.int64)
    read_often_kernel[(1,)](word, flag, out, rank, ctx.get_heap_bases(), ctx.get_watchdog(), 400)
    ctx.barrier()
    ctx.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ready", [True, False])
def test_a_wait_knows_only_what_came_with_the_value_that_it_waits_for(ready: bool, seed: int) -> None:
    """In any schedule, also where the peer has signalled again meanwhile."""
    report = check(exchange_twice, 2, args=(ready, False), schedules=4, seed=seed)
    assert bool(report.races) != ready, report
    assert not report.deadlocks
    assert ready or all(check(exchange_twice, 2, args=(ready, False), schedules=n).races for n in (1, 2))


def test_a_wait_for_a_flag_that_was_reset_knows_what_came_since() -> None:
    report = check(exchange_twice, 2, args=(True, True), schedules=8)
    assert report.ok, report


@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("expected", [3, 4])
def test_a_wait_for_too_few_ends_as_soon_as_it_can(expected: int, reader: int) -> None:
    report = check(wait_for_some_programs, 2, args=(expected, reader), schedules=2)
    assert bool(report.races) == (expected < 4), report


@pytest.mark.parametrize("program", [wait_for_many, add_to_some, announce_between, read_often])
def test_what_is_right_is_not_reported(program: Callable[..., None]) -> None:
    report = check(program, 2, schedules=4)
    assert report.ok, report


@pytest.mark.parametrize("program", [wait_in_a_circle, poll_one_of_some])
def test_what_can_never_go_on_is_a_deadlock(program: Callable[..., None]) -> None:
    assert check(program, 2, schedules=2).deadlocks


@pytest.mark.parametrize("reads", [True, False])
def test_a_host_that_reads_what_was_made_of_memory_knows_what_its_stream_did(reads: bool) -> None:
    report = check(read_a_sum, 2, args=(reads,), schedules=4)
    assert report.ok == reads, report


def backward(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(HEAP_BYTES)
    ctx.barrier()
    weight = torch.ones(3, requires_grad=True)
    (2 * weight).sum().backward()
    assert weight.grad is not None
    ctx.close()


def test_a_check_leaves_torchs_modes_alone() -> None:
    for schedules in (1, 3):
        assert check(backward, 3, schedules=schedules).ok
        assert torch.is_grad_enabled()
    with torch.no_grad():
        assert check(wait_for_many, 2, schedules=1).ok
        assert not torch.is_grad_enabled()


def asks_for_too_much(rank: int, world_size: int) -> None:
    iris_core.iris(HEAP_BYTES, "cpu").zeros(HEAP_BYTES)


def test_an_error_of_the_library_is_reported_with_the_users_line() -> None:
    (error,) = check(asks_for_too_much, 2, schedules=1).errors
    assert re.search(r"^\S*test_checker_programs\.py:\d+: rank 0's host: HeapExhausted: ", error), error
    assert "contextlib" not in error
