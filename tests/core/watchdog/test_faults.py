"""Ranks that are late, silent or out of memory: outputs stay right, or every rank raises and says what was awaited."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import fault, make_data
from families import FUSED, make_problem, name
from faults import doomed_context, dropped, unsteady_signals
from limits import clock_of_waits, has_happened, never, wait_until
from ranks import Ranks, close_context, context, raised

from iris_core import Context
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.device.handshake import COUNTS_OF_A_CALL
from iris_kernels.common.operators.operator import Operator
from overlap_taxonomy import Variant, get_variant

# Faults are put into interpreted kernels.
pytestmark = pytest.mark.parametrize("device", ["cpu"])
HEAP_SIZE = 1 << 20
DTYPE = torch.bfloat16
each_fused_variant = pytest.mark.parametrize("variant", FUSED, ids=name)


def make_operator(ctx: Context, family: str, variant: str) -> Operator[Any]:
    """Return an operator of several tiles, with programs for each role."""
    problem = make_problem(family, 18, 34, 16, ctx.get_num_ranks(), DTYPE)
    config = GemmConfig(16, 16, 16, num_warps=4, num_sms=2, comm_sms=1, descriptors=False)
    return get_variant(family, variant).build(ctx, problem, config)


def call(operator: Operator[Any], seed: int) -> str | None:
    """Call an operator; return what is wrong with its output."""
    data = make_data(operator.family, operator.problem, operator.rank, seed, operator.ctx.get_device())
    operator.output.fill_(float("nan"))
    return fault(operator(data.a, data.b), data, DTYPE)


UNSTEADY_CALLS = 3


def send_unsteadily(rank: int, world_size: int, family: str, variant: str, seed: int) -> list[str | None]:
    operator = make_operator(context(), family, variant)
    with unsteady_signals(seed + rank, latest_s=2e-3, copies=3):
        faults = [call(operator, seed) for seed in range(UNSTEADY_CALLS)]
    operator.close()
    return faults


@each_fused_variant
def test_signals_may_come_late_and_more_than_once(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert ranks(2).call(send_unsteadily, variant.family, variant.name, seed) == [[None] * UNSTEADY_CALLS] * 2


def start_late(rank: int, world_size: int, seed: int) -> str | None:
    close_context()
    late = random.Random(seed + rank)
    for step in (context, lambda: make_operator(context(), "gemm_all_scatter", "fused_sequential:portable")):
        time.sleep(late.uniform(0, 0.3))
        made = step()
    time.sleep(late.uniform(0, 0.3))
    wrong = call(made, seed)
    made.close()
    return wrong


def test_ranks_may_start_in_any_order(ranks: Callable[[int], Ranks]) -> None:
    for _ in range(2):
        seed = random.randrange(1 << 30)
        print(f"seed {seed}")
        assert ranks(2).call(start_late, seed) == [None] * 2


def fall_behind(rank: int, world_size: int, family: str, variant: str, calls: int) -> tuple[list[int], list[str]]:
    """Rank 0 comes late to the first call; the others would be through with all of them by then.

    Returns how far ahead peers were found, on rank 0, and what was wrong.
    """
    ctx = context()
    operator = make_operator(ctx, family, variant)
    started = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    ahead, faults = [], []
    for number in range(calls):
        if rank == 0:
            if number == 0:
                wait_until(has_happened(ctx.peer_view(started)[1]))
                time.sleep(0.2)
            ahead.append(int(ctx.peer_view(started)[1:].max()) - number)
        started += 1
        if wrong := call(operator, number):
            faults.append(f"call {number}, rank {rank}: {wrong}")
    ctx.barrier()
    ctx.free(started)
    operator.close()
    return ahead, faults


@each_fused_variant
def test_nobody_runs_ahead_of_a_rank_that_sleeps(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    (ahead, faults), *peers = ranks(2).call(fall_behind, variant.family, variant.name, 4)
    assert faults == []
    assert [faults for _, faults in peers] == [[]]
    assert ahead[0] == 1, "a peer waits in its first call"
    assert max(ahead) <= 1


# Variants whose waits differ: for a peer's call, for parts of its data, for its tiles; by programs and by streams.
AWAITED = {
    ("gemm_all_scatter", "fused_sequential:portable"): "rank 1 to be done",
    ("all_gather_gemm", "workgroup_specialized:portable"): "rank 1 to be done",
    ("all_gather_gemm", "copy_engine:portable"): "chunk 0 of rank 1's shard",
    ("gemm_reduce_scatter", "fused_sequential:portable"): "of rank 1's partial sum",
    ("gemm_reduce_scatter", "copy_engine:portable"): "rank 1 to be done",
    ("gemm_all_reduce", "workgroup_specialized:portable"): "of rank 1's partial sum",
}
SILENCED = [(v, "data") for v in FUSED if (v.family, v.name) in AWAITED]
SILENCED += [(v, "ready") for v, _ in SILENCED if v.name == "fused_sequential:portable"][:1]


def fall_silent(rank: int, world_size: int, family: str, variant: str, what: str) -> tuple[tuple[str, str], int]:
    """Rank 1 makes two calls, then drops what it says; return every rank's error, and how much was dropped."""
    close_context()
    with doomed_context(HEAP_SIZE) as ctx:
        operator = make_operator(ctx, family, variant)
        counts = ctx.zeros(1, dtype=torch.int64)
        assert [call(operator, seed) for seed in range(2)] == [None, None]
        ctx.barrier()
        silent = ctx.peer_view(counts)[0, 0]  # rank 0 hears of it, and of nothing else

        def go_on() -> None:
            with dropped(what, silent) if rank == 1 else contextlib.nullcontext():
                call(operator, 2)
            for seed in range(3, 9):
                call(operator, seed)

        with clock_of_waits(has_happened(silent) if rank == 0 else never):
            return raised(go_on), int(silent)


@pytest.mark.parametrize(
    ("variant", "what"), SILENCED, ids=lambda value: value if isinstance(value, str) else name(value)
)
def test_what_a_silent_rank_did_not_say_is_named(ranks: Callable[[int], Ranks], variant: Variant, what: str) -> None:
    waiting, silent = ranks(2).call(fall_silent, variant.family, variant.name, what)
    assert silent[1] > 0, "nothing was dropped"
    (kind, message), _ = waiting
    assert (kind, silent[0][0]) == ("TimeoutError", "TimeoutError"), silent[0][1]
    assert message.startswith("rank 0: ")
    assert f"{variant.family}/{variant.name} of 18x34x16: " in message
    assert ("rank 1 to be ready" if what == "ready" else AWAITED[variant.family, variant.name]) in message


def corrupt_a_flag(rank: int, world_size: int, family: str, variant: str) -> tuple[str, str] | list[str | None]:
    """Between two calls, lower what rank 0 has heard from rank 1."""
    close_context()
    with doomed_context(HEAP_SIZE) as ctx:
        operator = make_operator(ctx, family, variant)
        called = ctx.zeros(1, dtype=torch.int64)
        assert [call(operator, seed) for seed in range(2)] == [None, None]
        ctx.barrier()
        if rank == 0:
            operator.state[world_size + 1] -= 1  # done[1]
        ctx.barrier()

        def go_on() -> None:
            for seed in range(2, 6):
                faults.append(call(operator, seed))
                ctx.peer_view(called)[1 - rank] += 1

        faults: list[str | None] = []
        if variant in REPAIRED:
            go_on()
            return faults
        with clock_of_waits(has_happened(called) if rank == 0 else never):
            return raised(go_on)


REPAIRED = (
    "bulk_synchronous:portable",
)  # signals say the whole number each time; counted parts go on from what is there


def test_a_lowered_flag_is_written_whole_by_the_next_signal(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(corrupt_a_flag, "gemm_all_scatter", "bulk_synchronous:portable") == [[None] * 4] * 2


def test_a_lowered_count_of_parts_is_reported_with_what_was_expected_and_seen(ranks: Callable[[int], Ranks]) -> None:
    (kind, message), (other, _) = ranks(2).call(corrupt_a_flag, "all_gather_gemm", "workgroup_specialized:portable")
    assert (kind, other) == ("TimeoutError", "TimeoutError")
    due = 3 * COUNTS_OF_A_CALL.value
    counted = f"expected at least {due}, saw {due - 1}"
    for part in ("all_gather_gemm/workgroup_specialized:portable of 18x34x16: rank 1 to be done", counted):
        assert part in message


def run_out_of_memory(rank: int, world_size: int, family: str, variant: str, where: str) -> tuple[str, str]:
    """On rank 1 alone, the last buffer of an operator cannot be had."""
    ctx = context()
    used = ctx.heap.allocator.used_bytes
    make_operator(ctx, family, variant).close()
    ctx.barrier()
    regions = len(ctx.watchdog.watched)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and where == "heap":
            free = ctx.heap.allocator._free
            patch.setattr(ctx.heap.allocator, "_free", {max(free, key=free.__getitem__): 1024})  # room for the first
        elif rank == 1:
            patch.setattr(torch, "zeros", refuse)
        error = raised(make_operator, ctx, family, variant)
    ctx.barrier()
    assert ctx.heap.allocator.used_bytes == used
    assert len(ctx.watchdog.watched) == regions
    operator = make_operator(ctx, family, variant)
    assert call(operator, 1) is None
    operator.close()
    return error


def refuse(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no memory for you")


@pytest.mark.parametrize(
    ("where", "kind", "said"), [("heap", "HeapExhausted", "exhausted"), ("device", "PeerError", "no memory for you")]
)
@pytest.mark.parametrize("variant", [v for v in FUSED if v.name == "fused_sequential:portable"], ids=name)
def test_memory_that_one_rank_lacks_fails_on_all_and_leaves_nothing(
    ranks: Callable[[int], Ranks], variant: Variant, where: str, kind: str, said: str
) -> None:
    if where == "device" and variant.family == "gemm_all_scatter":
        pytest.skip("all its buffers are on the heap")
    (other, message), (own, own_message) = ranks(2).call(run_out_of_memory, variant.family, variant.name, where)
    assert (other, own) == (kind, "HeapExhausted" if where == "heap" else "OutOfMemoryError")
    assert "rank 1 failed to make" in message
    assert said in message
    assert said in own_message
