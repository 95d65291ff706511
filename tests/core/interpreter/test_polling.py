"""Loops that poll without a pause: other programs go on meanwhile, and what never comes is an error with its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from limits import short_limit
from ranks import Ranks, context, raised

import iris_core
from iris_core.checker import check
from iris_core.interpreter.polling import Polling

on_cpu = pytest.mark.parametrize("device", ["cpu"])
ROUNDS = 3


@triton.jit
def cas_on_heap(flag_ptr, expected, rank, heap_bases):
    while iris_core.atomic_cas(flag_ptr, expected, expected, rank, rank, heap_bases, sem="acquire") != expected:
        pass


@triton.jit
def cas(flag_ptr, expected, rank, heap_bases):
    while (
        tl.atomic_cas(flag_ptr, tl.cast(expected, tl.int64), tl.cast(expected, tl.int64), sem="acquire", scope="sys")
        != expected
    ):
        pass


@triton.jit
def add_nothing(flag_ptr, expected, rank, heap_bases):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") != expected:
        pass


@triton.jit
def volatile_load(flag_ptr, expected, rank, heap_bases):
    while tl.load(flag_ptr, volatile=True) < expected:
        pass


@triton.jit
def volatile_block(flag_ptr, expected, rank, heap_bases):
    lanes = tl.arange(0, 2)
    while tl.max(tl.load(flag_ptr + lanes, mask=lanes < 1, other=0, volatile=True), axis=0) < expected:
        pass


@triton.jit
def load_on_heap(flag_ptr, expected, rank, heap_bases):
    while iris_core.load(flag_ptr, rank, rank, heap_bases) < expected:
        pass


@triton.jit
def plain_load(flag_ptr, expected, rank, heap_bases):
    while tl.load(flag_ptr) < expected:
        pass


WAITS = (cas_on_heap, cas, add_nothing, volatile_load, volatile_block, load_on_heap, plain_load)
all_waits = pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.fn.__name__)


@triton.jit
def exchange_kernel(flag_ptr, rank, heap_bases, WAIT: tl.constexpr, ROUNDS: tl.constexpr):
    """Program 1 signals to program 0 of the peer, which answers, some rounds."""
    for number in range(1, ROUNDS + 1):
        if tl.program_id(0) == 0:
            WAIT(flag_ptr, number, rank, heap_bases)
            tl.debug_barrier()
            iris_core.atomic_xchg(flag_ptr + 1, number, rank, 1 - rank, heap_bases)
        else:
            WAIT(flag_ptr + 1, number - 1, rank, heap_bases)
            tl.debug_barrier()
            iris_core.atomic_xchg(flag_ptr, number, rank, 1 - rank, heap_bases)


def exchange(ctx: Any, wait: Any) -> list[int]:
    flags = ctx.zeros(2, dtype=torch.int64)
    ctx.barrier()
    exchange_kernel[(2,)](flags, ctx.get_rank(), ctx.get_heap_bases(), wait, ROUNDS)
    ctx.barrier()
    found = flags.tolist()
    ctx.free(flags)
    return found


def exchange_interpreted(rank: int, world_size: int, waits: tuple[str, ...]) -> list[list[int]]:
    return [exchange(context(), globals()[wait]) for wait in waits]


@on_cpu
def test_who_polls_lets_others_run(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(2).call(exchange_interpreted, tuple(wait.fn.__name__ for wait in WAITS))
    assert found == [[[ROUNDS] * 2] * len(WAITS)] * 2


def exchange_checked(rank: int, world_size: int, wait: Any) -> None:
    ctx = iris_core.iris(1 << 20)
    assert exchange(ctx, wait) == [ROUNDS] * 2


@all_waits
def test_who_polls_lets_others_run_under_the_race_checker(wait: Any) -> None:
    report = check(exchange_checked, 2, args=(wait,), schedules=2)
    assert not report.deadlocks
    assert not report.errors
    assert report.ok or wait in (load_on_heap, plain_load)  # which race with the signal


@triton.jit
def lonely_kernel(flag_ptr, rank, heap_bases, WAIT: tl.constexpr):
    WAIT(flag_ptr + 1, 1, rank, heap_bases)


def wait_for_nobody(ctx: Any, wait: Any) -> None:
    flags = ctx.zeros(2, dtype=torch.int64)
    lonely_kernel[(2,)](flags, ctx.get_rank(), ctx.get_heap_bases(), wait)


def wait_interpreted(rank: int, world_size: int, waits: tuple[str, ...]) -> list[tuple[str, str]]:
    ctx = context()
    with short_limit(ctx, 0.05):
        return [raised(wait_for_nobody, ctx, globals()[wait]) for wait in waits]


@on_cpu
def test_what_never_comes_is_an_error_within_the_limit(ranks: Callable[[int], Ranks]) -> None:
    (errors,) = ranks(1).call(wait_interpreted, tuple(wait.fn.__name__ for wait in WAITS))
    for kind, message in errors:
        assert kind == "InterpreterError"
        flag = re.escape("byte 8 of (2,) of torch.int64, on rank 0's heap")
        assert re.search(f"TimeoutError.*a loop polled {flag}, for 0.05 s", message), message


def wait_checked(rank: int, world_size: int, wait: Any) -> None:
    wait_for_nobody(iris_core.iris(1 << 20), wait)


@all_waits
def test_what_never_comes_is_a_deadlock_under_the_race_checker(wait: Any) -> None:
    report = check(wait_checked, 1, args=(wait,), schedules=1)
    (deadlock,) = report.deadlocks
    assert "program 0, of lonely_kernel waits for byte 8 of (2,) of torch.int64, on rank 0's heap at " in deadlock
    assert re.search(rf"test_polling\.py:\d+ \({wait.fn.__name__}\)", deadlock)


@triton.jit
def read_again_kernel(word_ptr, out_ptr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Looks at one word all the time, and works."""
    total = tl.zeros((BLOCK,), tl.int64)
    for _ in range(ROUNDS):
        for chunk in range(2):
            total += tl.load(word_ptr, volatile=True) * tl.load(word_ptr + chunk * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.arange(0, BLOCK), total)


def read_again(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(1 << 20)
    words, out = ctx.ones(16, dtype=torch.int64), ctx.zeros(8, dtype=torch.int64)
    read_again_kernel[(1,)](words, out, 100, 8)
    assert out.tolist() == [200] * 8


def test_who_reads_a_word_again_and_works_is_not_stuck() -> None:
    report = check(read_again, 1, schedules=1)
    assert report.ok, report


def test_polls_are_told_from_work() -> None:
    polling = Polling()

    def looks(*words: tuple[str, int]) -> list[int]:
        return [polling.look(*word) for word in words]

    flag, other = ("flag", 0), ("other", 0)
    assert looks(flag, flag, flag) == [0, 1, 2]
    assert looks(("flag", 1), flag, flag) == [0, 0, 1]  # it changed
    assert looks(other, flag, other, flag, flag) == [0, 1, 1, 2, 3]  # after something new all begins again
    polling.work()
    assert (polling.times, looks(flag, flag)) == (0, [0, 1])
