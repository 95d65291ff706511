"""After a failed wait every rank raises, and goes on raising, until all have called reset; then everything works again.

A signal is dropped where a rank calls `signal`, in the interpreter.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from checking import fault, make_data, poison
from families import FUSED, GPU_FUSED, make_problem, name
from limits import clock_of_waits, has_happened, never, short_limit
from ranks import TIMEOUT_S, Ranks, context, raised

import iris_core
from iris_core import RankPool
from iris_kernels.common.device import handshake
from overlap_taxonomy import Sync, Variant, get_variant

DTYPE = torch.bfloat16

# Of each family, where programs wait and where a stream does. The handshake is the same in all.
PATTERNS = ("copy_engine:portable", "fused_sequential:portable")
variants = pytest.mark.parametrize("variant", [v for v in FUSED if v.name in PATTERNS], ids=name)
on_cpu = pytest.mark.parametrize("device", ["cpu"])


def dropping(count: int, lost: torch.Tensor) -> Any:
    """Lose this rank's next `count` signals of the handshake; say so in a word."""
    send, left = handshake.signal, [count]

    def drop(*args: Any, **kwargs: Any) -> Any:
        if left[0] == 0:
            return send(*args, **kwargs)
        left[0] -= 1
        return lost.fill_(1)

    return mock.patch.object(handshake, "signal", drop)


def call_until_it_raises(operator: Any, data: Any, called: torch.Tensor | None = None) -> tuple[str, str]:
    """Call an operator, say so in a word of the heap if asked to, and meet; return what was raised."""

    def go_on() -> None:
        for _ in range(3):
            operator(data.a, data.b)
        if called is not None:
            operator.ctx.peer_view(called).fill_(1)
        operator.ctx.barrier()

    return raised(go_on)


def check_calls(operator: Any, seed: int) -> str | None:
    """Call an operator on fresh data over a poisoned output, several times; return what was wrong."""
    for call in range(3):
        data = make_data(operator.family, operator.problem, operator.rank, seed + call, operator.ctx.get_device())
        poison(operator)
        operator.ctx.barrier()  # no peer pushes before the poison is in
        if wrong := fault(operator.as_matrix(operator(data.a, data.b)).clone(), data, DTYPE):
            return f"seed {seed}, call {call}: {wrong}"
    return None


def what_is_refused(ctx: Any, operator: Any, data: Any) -> set[tuple[str, str]]:
    uses: list[Callable[[], Any]] = [
        lambda: operator(data.a, data.b),
        ctx.barrier,
        ctx.device_barrier,
        ctx.get_watchdog,
        lambda: ctx.zeros(3),
        lambda: ctx.free(operator.output),
        lambda: ctx.broadcast(1, 0),
        lambda: get_variant(operator.family, operator.variant).build(ctx, operator.problem),
    ]
    return {raised(use) for use in uses}


def drop_and_reset(rank: int, world_size: int, family: str, variant: str) -> list[Any]:
    """Rank 1 loses its first signal to rank 0, whose time is up then; its own is not."""
    ctx = context()
    problem = make_problem(family, 40, 70, 33, world_size, DTYPE)
    operator = get_variant(family, variant).build(ctx, problem)
    other = get_variant(family, "bulk_synchronous:portable").build(ctx, problem)
    words = ctx.zeros(1, dtype=torch.int64)
    results = []
    for time_around in range(2):
        assert check_calls(operator, 10 * time_around) is None
        data = make_data(family, problem, rank, 0, ctx.get_device())
        lost = ctx.peer_view(words)[0].zero_()
        ctx.barrier()
        with (
            clock_of_waits(has_happened(lost) if rank == 0 else never),
            dropping(world_size - 1, lost) if rank == 1 else contextlib.nullcontext(),
        ):
            error = call_until_it_raises(operator, data)
        refused = what_is_refused(ctx, operator, data)
        ctx.reset()
        faults = [check_calls(operator, 100 * time_around + 50), check_calls(other, 100 * time_around + 60)]
        results.append((error, refused, faults))
    operator.close()
    other.close()
    ctx.free(words)
    return results


@on_cpu
@variants
def test_a_dropped_signal_is_reported_by_all_ranks_and_reset_mends_it(
    ranks: Callable[[int], Ranks], variant: Variant
) -> None:
    by_rank = ranks(2).call(drop_and_reset, variant.family, variant.name)
    # A call's first signal says that it begins; where only its end is signalled, that.
    lost = "done" if variant.sync is Sync.SHARD_FLAG else "ready"
    for results in by_rank:
        for (kind, message), refused, faults in results:
            assert kind == "TimeoutError"
            for part in (
                f"{variant.family}/{variant.name} of 40x70x33: rank 1 to be {lost}",
                f"flag {lost}[1]",
                "rank 0: program",
                f"timed out after {TIMEOUT_S} s waiting",
                "expected at least",
                "saw",
                "reset()",
            ):
                assert part in message
            assert refused == {(kind, message)}  # whatever is tried, the same error
            assert faults == [None, None]
        # The report counts calls from the last reset: three good ones, then the one whose signal was lost.
        assert "in call 4: expected at least 4, saw 3" in results[0][0][1]


def corrupt_and_reset(rank: int, world_size: int, by: int) -> Any:
    """Rank 0 counts its calls wrongly from now on. One rank waits in vain; it gives up when the other is through.

    Two calls behind, rank 0 goes through two alone and makes its third with rank 1's first, whose second then waits.
    """
    ctx = context()
    family = "gemm_all_scatter"
    operator = get_variant(family, "fused_sequential:portable").build(
        ctx, make_problem(family, 40, 70, 33, world_size, DTYPE)
    )
    called = ctx.zeros(1, dtype=torch.int64)
    assert check_calls(operator, 1) is None
    ctx.barrier()
    if rank == 0:
        operator.state[2 * world_size] += by
    data = make_data(family, operator.problem, rank, 0, ctx.get_device())
    time_is_up = has_happened(called) if by < 0 else lambda: True  # too far ahead, rank 0 can do nothing at all
    with clock_of_waits(time_is_up if rank == (by < 0) else never):
        error = call_until_it_raises(operator, data, called)
    ctx.reset()
    wrong = check_calls(operator, 5)
    operator.close()
    ctx.free(called)
    return error, wrong


@on_cpu
@pytest.mark.parametrize("by", [-2, 5])
def test_a_wrong_call_number_is_found_and_reset_mends_it(ranks: Callable[[int], Ranks], by: int) -> None:
    for (kind, message), wrong in ranks(2).call(corrupt_and_reset, by):
        assert kind == "TimeoutError"
        assert f"rank {int(by < 0)}: program" in message
        assert f"gemm_all_scatter/fused_sequential:portable of 40x70x33: rank {int(by > 0)} to be ready" in message
        assert ("expected at least 5, saw 4" if by < 0 else "expected at least 9, saw") in message
        assert wrong is None


def miss_and_reset(rank: int, world_size: int, family: str, variant: str, times: int) -> list[Any]:
    """Rank 1 leaves a call out, while rank 0 queues several that wait for it."""
    ctx = context()
    operator = get_variant(family, variant).build(ctx, make_problem(family, 520, 544, 96, world_size, DTYPE))
    results = []
    for time_around in range(times):
        assert check_calls(operator, 10 * time_around) is None
        data = make_data(family, operator.problem, rank, 0, ctx.get_device())
        ctx.barrier()
        start = time.monotonic()
        error = call_until_it_raises(operator, data) if rank == 0 else raised(ctx.barrier)
        seconds = time.monotonic() - start
        refused = what_is_refused(ctx, operator, data)
        ctx.reset()
        results.append((error, seconds, refused, check_calls(operator, 10 * time_around + 5)))
    operator.close()
    return results


ON_GPUS = {  # streams that wait for words and for other streams, and Hopper's kernels
    ("gemm_all_scatter", "producer_consumer:portable"),
    ("all_gather_gemm", "copy_engine:portable"),
    ("gemm_reduce_scatter", "copy_engine:portable"),
    ("gemm_reduce_scatter", "warp_specialized:sm90"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [v for v in GPU_FUSED if (v.family, v.name) in ON_GPUS], ids=name)
def test_a_missed_call_is_mended_on_gpus(variant: Variant) -> None:
    """Copy engines: streams wait without a limit, and go on because a kernel that has given up counts its tiles."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    limit_s = 12.0  # more than compiling takes
    times = 2 if variant.family == "all_gather_gemm" else 1
    with RankPool(2, "cuda", environment={"IRIS_TIMEOUT_S": str(limit_s)}) as pool:
        for results in pool.call(miss_and_reset, variant.family, variant.name, times):
            for (kind, message), seconds, refused, wrong in results:
                print(f"{seconds:.2f} s: {message}")
                assert kind == "TimeoutError"
                assert f"{variant.family}/{variant.name} of 520x544x96: " in message
                waited_for = (
                    "rank 1 to be ready",
                    "rank 1 to be done",
                    "of rank 1's partial sum",
                    "of rank 1's shard:",
                )
                assert any(what in message for what in waited_for), message  # whichever is first
                in_calls = ("in call 4: expected at least 4, saw 3", "in call 7", "shard: expected at least 1, saw 0")
                assert any(call in message for call in in_calls), message  # flags of shards have no numbers
                assert seconds < 2 * limit_s
                assert refused == {(kind, message)}
                assert wrong is None


def fail_in_different_places(rank: int, world_size: int, early: int) -> Any:
    """Rank `early` finds out in a call of an operator, the other as it waits for it at the barrier; then both reset."""
    ctx = context()
    family = "gemm_all_scatter"
    problem = make_problem(family, 16, 16, 16, world_size, DTYPE)
    operator = get_variant(family, "fused_sequential:portable").build(ctx, problem)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    flag = ctx.zeros(1, dtype=torch.int64)
    ctx.watchdog.watch(flag, lambda word, _: "a letter")
    ctx.barrier()
    if rank == early:
        with short_limit(ctx):
            wait_for[(1,)](flag, 1, ctx.get_watchdog())
        error = raised(operator, data.a, data.b)
        again = [raised(operator, data.a, data.b)]
    else:
        error = raised(ctx.barrier)
        again = [raised(ctx.barrier), raised(ctx.barrier)]
    flag.fill_(7)
    ctx.reset()  # zeroes what is watched
    state = flag.item()
    ctx.watchdog.unwatch(flag)
    ctx.free(flag)
    wrong = check_calls(operator, 3)
    operator.close()
    return error, again, state, wrong


@triton.jit
def wait_for(flag_ptr, expected, watchdog_ptr):
    iris_core.wait(flag_ptr, expected, watchdog_ptr)


@on_cpu
@pytest.mark.parametrize("early", [0, 1])
def test_ranks_that_fail_in_different_places_meet_again(ranks: Callable[[int], Ranks], early: int) -> None:
    for error, again, state, wrong in ranks(2).call(fail_in_different_places, early):
        assert error[0] == "TimeoutError"
        assert f"rank {early}: program 0 timed out " in error[1]
        assert " s waiting for a letter: expected at least 1, saw 0" in error[1]
        assert set(again) == {error}
        assert state == 0
        assert wrong is None


def wait_for_a_flag_of_no_name(rank: int, world_size: int) -> Any:
    ctx = context()
    flags = ctx.zeros(3, dtype=torch.int64)
    ctx.barrier()
    if rank == 0:
        with short_limit(ctx):
            wait_for[(1,)](flags[2:], 1, ctx.get_watchdog())
    error = raised(ctx.barrier)
    ctx.reset()
    ctx.free(flags)
    return error


@on_cpu
def test_a_flag_of_no_name_is_where_it_is_on_the_heap(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(wait_for_a_flag_of_no_name):
        assert kind == "TimeoutError"
        assert "waiting for the flag at byte 16 of (3,) of torch.int64, on rank 0's heap: expected at least" in message


def wait_on_a_stream(rank: int, world_size: int) -> Any:
    ctx = context()
    counts = torch.zeros(2, dtype=torch.int32)
    ctx.watchdog.watch(counts, lambda word, _: f"panel {word}")
    ctx.barrier()
    if rank == 0:
        with short_limit(ctx):
            ctx.make_stream().wait_value(counts[1], 5)
    error = raised(ctx.barrier)
    ctx.watchdog.unwatch(counts)
    ctx.reset()
    return error


@on_cpu
def test_a_streams_wait_in_vain_is_reported_like_a_kernels(ranks: Callable[[int], Ranks]) -> None:
    (kind, message), at_rank_1 = ranks(2).call(wait_on_a_stream)
    assert kind == at_rank_1[0] == "TimeoutError"
    assert re.search(r"rank 0: a stream timed out after \S+ s waiting for panel 1: expected at least 5, saw 0", message)
    assert re.search(r"a stream timed out after \S+ s waiting for a flag of rank 0's own", at_rank_1[1])


def reset_when_well(rank: int, world_size: int) -> Any:
    ctx = context()
    family = "gemm_reduce_scatter"
    operator = get_variant(family, "copy_engine:portable").build(ctx, make_problem(family, 8, 8, 8, world_size, DTYPE))
    wrongs = []
    for seed in range(2):
        wrongs.append(check_calls(operator, seed))
        ctx.barrier()
        ctx.reset()
    operator.close()
    return wrongs


@on_cpu
def test_a_reset_of_what_is_well_does_no_harm(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(reset_when_well) == [[None, None]] * 2
