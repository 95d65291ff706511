"""Signals, waits and barriers between real ranks: what is announced has arrived, and every wait is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from families import FUSED, make_problem, name
from limits import short_limit
from ranks import Ranks, close_context, context, raised

import iris_core
from iris_core.device.sync import WATCHDOG_TIMEOUT_NS
from iris_core.interpreter import grid as grids
from iris_core.interpreter.grid import Grid
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
def rounds_kernel(flags_ptr, watchdog_ptr, ROUNDS: tl.constexpr, FLAGS: tl.constexpr):
    """Every program waits, round by round, for the flags of the next ones, in a ring."""
    next_ones = (tl.program_id(0) + 1 + tl.arange(0, FLAGS)) % tl.num_programs(0)
    for number in range(1, ROUNDS + 1):
        iris_core.signal(flags_ptr + tl.program_id(0), number)
        iris_core.wait_each(flags_ptr + next_ones, number, next_ones >= 0, watchdog_ptr)


def go_round(rank: int, world_size: int) -> list[int]:
    """Wait for more flags than a warp has threads, of which several threads see each, at different times."""
    ctx = context()
    programs, flags, rounds = (128, 64, 2000) if torch.device(ctx.device).type == "cuda" else (4, 2, 3)
    words = ctx.zeros(programs, dtype=torch.int64)
    ctx.barrier()
    rounds_kernel[(programs,)](words, ctx.get_watchdog(), ROUNDS=rounds, FLAGS=flags, num_warps=8)
    ctx.barrier()
    missing = [rounds - number for number in words.tolist()]
    ctx.free(words)
    return missing


def test_a_wait_for_many_flags_fails_only_if_one_does_not_come(ranks: Callable[[int], Ranks]) -> None:
    (missing,) = ranks(1).call(go_round)
    assert set(missing) == {0}


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


# Waits that fail. Whoever gives up has a short limit; the others hear of it.


@triton.jit
def wait_kernel(flag_ptr, expected, watchdog_ptr):
    iris_core.wait(flag_ptr, expected, watchdog_ptr)


def wait_in_vain(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    flags = ctx.full((4,), 3, dtype=torch.int64)
    ctx.watchdog.watch(flags, lambda word, _: f"letter {word}")
    ctx.barrier()
    with short_limit(ctx):
        if rank == 0:
            wait_kernel[(1,)](flags[2:], 5, ctx.get_watchdog())
            ctx.backend.synchronize()
    error = raised(ctx.barrier)
    ctx.watchdog.unwatch(flags)
    ctx.reset()
    ctx.free(flags)
    return error


def test_a_wait_in_vain_names_the_flag_and_what_it_saw(ranks: Callable[[int], Ranks]) -> None:
    waiting, other = ranks(2).call(wait_in_vain)
    assert waiting[0] == "TimeoutError"
    for part in ("rank 0: program 0 timed out", "letter 2", "at least 5", "saw 3", "IRIS_TIMEOUT_S", "reset()"):
        assert part in waiting[1]
    assert other == waiting


def wait_for_the_rank_before(rank: int, world_size: int, who: int) -> tuple[str, str]:
    ctx = context()
    flags = ctx.zeros(2, dtype=torch.int64)
    ctx.watchdog.watch(flags, lambda word, rank: f"letter {word} from rank {(rank - 1) % world_size}")
    ctx.barrier()
    if rank == who:
        with short_limit(ctx):
            wait_kernel[(1,)](flags[1:], 1, ctx.get_watchdog())
            ctx.backend.synchronize()
    error = raised(ctx.barrier)
    ctx.reset()
    ctx.free(flags)
    return error


def test_what_a_rank_waited_for_is_the_same_for_all_who_hear_of_it(ranks: Callable[[int], Ranks]) -> None:
    first, *others = ranks(3).call(wait_for_the_rank_before, 1)
    assert "rank 1: program 0 timed out" in first[1]
    assert "for letter 1 from rank 0: expected at least 1, saw 0" in first[1]
    assert others == [first, first]


def give_up_though_no_wait_failed(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    flags = ctx.zeros(2, dtype=torch.int64)
    ctx.watchdog.watch(flags, lambda word, _: f"letter {word}")
    ctx.barrier()
    if rank == 0:
        ctx.watchdog.abort()  # as `close` does for who leaves with an exception
    ctx.control_plane.barrier()
    if rank == 1:
        wait_kernel[(1,)](flags, 1, ctx.get_watchdog())
        ctx.backend.synchronize()
    error = raised(ctx.barrier)
    ctx.reset()
    ctx.free(flags)
    return error


def test_who_gives_up_as_a_rank_has_left_says_that_it_may_have(ranks: Callable[[int], Ranks]) -> None:
    words = "rank 1: program 0 was aborted, as another wait had failed or a rank has left, waiting for letter 0"
    for kind, message in ranks(2).call(give_up_though_no_wait_failed):
        assert kind == "TimeoutError"
        assert words in message


@triton.jit
def signal_kernel(flag_ptr, number, watchdog_ptr):
    iris_core.signal(flag_ptr, number)


@triton.jit
def wait_each_kernel(flag_ptr, number, watchdog_ptr):
    lanes = tl.arange(0, 4)
    iris_core.wait_each(flag_ptr + lanes, number, lanes >= 0, watchdog_ptr)


def use_narrow_flags(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    flags = ctx.ones(4, dtype=torch.int32)
    errors = [
        raised(kernel[(1,)], flags, 1, ctx.get_watchdog()) for kernel in (signal_kernel, wait_kernel, wait_each_kernel)
    ]
    ctx.free(flags)
    return errors


@pytest.mark.parametrize("device", ["cpu"])
def test_flags_that_are_no_int64_words_are_refused(ranks: Callable[[int], Ranks]) -> None:
    """Interpreted kernels could wait for them; those of NVIDIA GPUs load 64 bits."""
    (errors,) = ranks(1).call(use_narrow_flags)
    assert len(errors) == 3
    for _, message in errors:
        assert "a flag is an int64 word; this one is given as pointer<int32>" in message


def watch_what_cannot_be_watched(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    flags = ctx.zeros((2, 4), dtype=torch.int64)

    def say(word: int, of: int) -> str:
        return f"letter {word}"

    watched = len(ctx.watchdog.watched)
    asked: list[tuple[Any, ...]] = [
        (flags[:, 0], say),
        (flags.to(torch.float32), say),
        (flags.to("meta"), say),
        ([0, 0], say),
        (flags, "letter"),
        (flags, lambda word: f"letter {word}"),
        (flags, say, lambda word: 1),
    ]
    errors = [raised(ctx.watchdog.watch, *one) for one in asked]
    assert len(ctx.watchdog.watched) == watched
    ctx.free(flags)
    return errors


@pytest.mark.parametrize("device", ["cpu"])
def test_what_cannot_be_watched_is_refused_at_once(ranks: Callable[[int], Ranks]) -> None:
    (found,) = ranks(1).call(watch_what_cannot_be_watched)
    words = ["strides (4,)", "torch.float32", "on meta", "[0, 0]", "'letter'", "index and a rank", "call_of"]
    for (kind, message), part in zip(found, words, strict=True):
        assert kind == "ValueError"
        assert part in message


def meet_alone(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    if rank == 1:
        with short_limit(ctx):
            ctx.device_barrier()
            ctx.backend.synchronize()
    error = raised(ctx.barrier)
    ctx.reset()
    return error


def test_a_device_barrier_that_a_rank_misses_names_it(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(meet_alone):
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
        with short_limit(ctx):
            operator(a, b)
    error = raised(ctx.barrier)
    ctx.reset()
    operator.close()
    return error


def call_alone_and_stall(rank: int, world_size: int, family: str, variant: str) -> tuple[str, str]:
    """As `call_alone`, the host stalling for longer than the limit whenever a program has read the clock."""
    read, stalled_s, now = Grid.clock_read, 0.0, time.monotonic

    def read_and_stall(grid: Grid) -> None:
        nonlocal stalled_s
        read(grid)
        stalled_s += 100.0

    with (
        mock.patch.object(Grid, "clock_read", read_and_stall),
        mock.patch.object(grids, "time", SimpleNamespace(monotonic=lambda: now() + stalled_s)),
    ):
        return call_alone(rank, world_size, family, variant)


@pytest.mark.parametrize("device", ["cpu"])
def test_a_wait_ends_itself_however_long_the_host_stalls(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(call_alone_and_stall, "gemm_all_scatter", "fused_sequential:portable"):
        assert kind == "TimeoutError"
        assert "rank 1 to be ready (its call has not started), flag ready[1], in call 1" in message


# One whose programs wait, one whose stream does. The handshake's waits are the same in all.
@pytest.mark.parametrize(
    "variant", [v for v in FUSED if v.name in ("fused_sequential:portable", "copy_engine:portable")], ids=name
)
@pytest.mark.parametrize("device", ["cpu"])
def test_an_operator_that_a_rank_does_not_call_names_it(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    for kind, message in ranks(2).call(call_alone, variant.family, variant.name):
        assert kind == "TimeoutError"
        awaited = "rank 1 to be ready (its call has not started), flag ready[1], in call 1"
        if variant.sync is Sync.SHARD_FLAG:  # not numbered
            awaited = "chunk 0 of rank 1's shard"
        for part in (
            f"{variant.family}/{variant.name} of 8x8x8: {awaited}: expected at least 1, saw 0",
            "rank 0: program",
            "IRIS_TIMEOUT_S",
        ):
            assert part in message


def ask_for_a_limit(rank: int, world_size: int, how: str) -> list[float]:
    """Return the limit of waits in kernels and on streams, and of the host's, where they are kept."""
    close_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRIS_TIMEOUT_S", "40")
        ctx = iris_core.iris(1 << 20, timeout_s=50) if how == "argument" else iris_core.iris(1 << 20)
    links: Any = ctx.control_plane.exchange._sockets.values()
    word = ctx.get_watchdog()[WATCHDOG_TIMEOUT_NS.value].item()
    stream: Any = ctx.make_stream()
    groups: Any = ctx.process_group()._get_backend(ctx.get_device())
    limits = [word / 1e9, stream._timeout_s, ctx.control_plane.timeout_s, groups.options._timeout.total_seconds()]
    limits += [link._timeout_s for link in links]
    ctx.close()
    return limits


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(("how", "limit_s"), [("argument", 50), ("environment", 40)])
def test_a_limit_that_is_asked_for_is_that_of_every_wait(
    ranks: Callable[[int], Ranks], how: str, limit_s: float
) -> None:
    """That waits go by it is seen with `short_limit`, which changes it in these places."""
    host = 2 * limit_s
    expected = [limit_s, limit_s, host, host]
    assert ranks(2).call(ask_for_a_limit, how) == [[*expected, host], [*expected, 1.25 * host]]
