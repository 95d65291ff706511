"""Several launches of one kernel: a report of races and deadlocks says which is meant."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl

import iris_core
from iris_core.checker import check


@triton.jit(do_not_specialize=["rank", "call"])
def send_kernel(letters_ptr, flag_ptr, copies_ptr, rank, call, heap_bases, watchdog_ptr, SIZE: tl.constexpr):
    """Send a letter to the other rank, and keep a copy of the one that comes."""
    lanes = tl.arange(0, SIZE)
    iris_core.store(letters_ptr + lanes, rank + call + lanes, rank, 1 - rank, heap_bases)
    iris_core.signal(iris_core.translate(flag_ptr, rank, 1 - rank, heap_bases), call)
    iris_core.wait(flag_ptr, call, watchdog_ptr)
    tl.store(copies_ptr + lanes, tl.load(letters_ptr + lanes))


def send(rank: int, world_size: int, calls: int, size: int) -> None:
    """Nothing says that the last letter was read before the next one is stored over it."""
    ctx = iris_core.iris(1 << 20)
    letters, copies = (ctx.zeros(size, dtype=torch.int64) for _ in range(2))
    flag = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    for call in range(1, calls + 1):
        send_kernel[(1,)](letters, flag, copies, rank, call, ctx.get_heap_bases(), ctx.get_watchdog(), size)
    ctx.barrier()
    ctx.close()


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("calls", [2, 3])
def test_a_race_with_the_next_launch_says_so(calls: int, size: int) -> None:
    report = check(send, 2, args=(calls, size), schedules=4)
    (race,) = report.races
    launches = {
        kind: int(number)
        for kind, number in re.findall(r"(read|write) by .* in launch (\d) of send_kernel at", str(race))
    }
    assert launches["write"] == launches["read"] + 1


@triton.jit(do_not_specialize=["rank"])
def read_kernel(letter_ptr, copy_ptr, rank, heap_bases):
    iris_core.store(letter_ptr, rank, rank, 1 - rank, heap_bases)
    tl.store(copy_ptr, tl.load(letter_ptr))


def send_without_a_wait(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(1 << 20)
    letter, copy = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    read_kernel[(1,)](letter, copy, rank, ctx.get_heap_bases())
    ctx.barrier()
    ctx.close()


def test_one_launch_has_no_number() -> None:
    assert check(send, 2, args=(1, 4), schedules=4).ok
    (race,) = check(send_without_a_wait, 2, schedules=4).races
    assert " in launch " not in str(race)


@triton.jit(do_not_specialize=["call"])
def wait_kernel(flag_ptr, call, watchdog_ptr):
    iris_core.wait(flag_ptr, call, watchdog_ptr)


def wait_once_too_often(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(1 << 20)
    flag = ctx.ones(1, dtype=torch.int64)
    for call in (1, 2):
        wait_kernel[(1,)](flag, call, ctx.get_watchdog())
    ctx.close()


def test_a_deadlock_in_a_later_launch_says_so() -> None:
    (deadlock,) = check(wait_once_too_often, 2, schedules=1).deadlocks
    assert "rank 0, program 0, of launch 2 of wait_kernel waits for byte 0 of (1,)" in deadlock
    assert "rank 0's stream waits for launch 2 of wait_kernel" in deadlock
