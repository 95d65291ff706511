"""Ranks whose calls differ are told without being waited for, where each call would otherwise fit what its rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import fault, make_data
from families import make_problem
from faults import doomed_context
from limits import clock_of_waits, has_happened, never, wait_until
from ranks import Ranks, close_context, context, raised

from iris_core.watchdog.call_log import CALLS, CallLog
from overlap_taxonomy import get_variant

pytestmark = pytest.mark.parametrize("device", ["cpu"])
FAMILY, DTYPE = "gemm_all_reduce", torch.float32
VARIANTS = "workgroup_specialized:portable", "fused_sequential:portable:stream_k"
MANY = 3 * CALLS  # more than are kept


def note_calls(rank: int, world_size: int) -> list[Any]:
    """Note calls in turns: rank 0's first, then rank 1's, of which the last differs."""
    ctx = context()
    log, found = CallLog(ctx.control_plane), []
    for turn in range(2):
        if turn == rank:
            found += [log.note(7, call) for call in range(MANY)]
        ctx.barrier()
    assert found == [None] * MANY
    for turn in range(2):
        if turn == rank:
            found.append(log.note(7 + rank, MANY))
        ctx.barrier()
    difference = found[-1] or log.note(7 + rank, 0)  # rank 0 is told at its next call
    ctx.barrier()
    log.clear()
    ctx.barrier()
    return [difference, log.note(1, 1)]


def test_each_rank_finds_where_the_others_calls_differ(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(note_calls)
    assert first == [(1, MANY + 1, (7, MANY), (8, MANY)), None]
    assert second == [(0, MANY + 1, (8, MANY), (7, MANY)), None]


def call_with_other_rows(rank: int, world_size: int, family: str) -> tuple[tuple[str, str], str | None]:
    """Rank 1 makes its second call with fewer rows, when rank 0 has made its own; then both reset and go on."""
    close_context()
    with doomed_context(1 << 22) as ctx:
        operator = get_variant(family, VARIANTS[0]).build(ctx, make_problem(family, 12, 8, 8, 2, DTYPE))
        told = ctx.zeros(1, dtype=torch.int64)

        def call(m: int, seed: int) -> str | None:
            data = make_data(family, make_problem(family, m, 8, 8, 2, DTYPE), rank, seed, ctx.get_device())
            return fault(operator.as_matrix(operator(data.a, data.b, m=m)), data, DTYPE)

        assert call(12, 0) is None
        ctx.barrier()
        if rank == 1:
            wait_until(lambda: ctx.recovery._calls._words[0] == 2)
        with clock_of_waits(has_happened(told) if rank == 0 else never):
            error = raised(lambda: (call(12 - 2 * rank, 1), ctx.check()))
            ctx.peer_view(told)[1 - rank] += 1
        ctx.reset()
        return error, call(9, 2)


@pytest.mark.parametrize("family", ["gemm_all_reduce", "all_gather_gemm"])
def test_ranks_with_other_numbers_of_rows_are_told(ranks: Callable[[int], Ranks], family: str) -> None:
    (waited, right), (refused, right_too) = ranks(2).call(call_with_other_rows, family)
    assert right is None
    assert right_too is None
    assert waited[0] in ("TimeoutError", "PeerError")
    assert refused[0] == "ValueError"
    said = "call 2 of rank 1 has 10 rows of A over all ranks, rank 0's has 12"
    assert f"{family}/{VARIANTS[0]}: {said}" in refused[1]
    assert "reset()" in refused[1]


def call_another(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 calls another operator than rank 0 has."""
    close_context()
    with doomed_context(1 << 22) as ctx:
        problem = make_problem(FAMILY, 12, 8, 8, 2, DTYPE)
        operators = [get_variant(FAMILY, name).build(ctx, problem) for name in VARIANTS]
        data, told = make_data(FAMILY, problem, rank, 0, ctx.get_device()), ctx.zeros(1, dtype=torch.int64)
        ctx.barrier()
        if rank == 1:
            wait_until(lambda: ctx.recovery._calls._words[0] == 1)
        with clock_of_waits(has_happened(told) if rank == 0 else never):
            error = raised(lambda: (operators[rank](data.a, data.b), ctx.check()))
            ctx.peer_view(told)[1 - rank] += 1
        return error


def test_ranks_that_call_other_operators_are_told(ranks: Callable[[int], Ranks]) -> None:
    _, (kind, message) = ranks(2).call(call_another)
    assert kind == "ValueError"
    assert f"{FAMILY}/{VARIANTS[1]}: call 1 of rank 1 is not what rank 0 calls" in message
