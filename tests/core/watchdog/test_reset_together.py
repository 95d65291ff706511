"""A reset is collective: who comes late, alone, or while the other meets is told so, and a next reset mends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from limits import has_happened, short_limit, wait_until
from ranks import Ranks, context, raised

pytestmark = pytest.mark.parametrize("device", ["cpu"])


def come_late(rank: int, world_size: int, late: int) -> Any:
    """Rank `late` comes to a barrier when its peer has given up waiting for it there."""
    ctx = context()
    timed_out = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    if rank == late:
        wait_until(has_happened(timed_out))
        error = raised(ctx.barrier)
    else:
        with short_limit(ctx, 0.5):
            error = raised(ctx.barrier)
        ctx.peer_view(timed_out).fill_(1)
    unusable = raised(ctx.zeros, 1)
    ctx.reset()
    ctx.free(timed_out)
    ctx.free(ctx.zeros(1))
    ctx.barrier()
    return error, unusable, ctx.broadcast(rank, 1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_named_and_reset_mends_it(ranks: Callable[[int], Ranks], late: int) -> None:
    results = ranks(2).call(come_late, late)
    for (kind, message), unusable, heard in results:
        assert kind == "PeerError"
        assert "reset()" in message
        assert unusable == (kind, message)
        assert heard == 1
    limit = "1.25 s (2.5 times the limit of a wait)" if late == 0 else "1 s (twice the limit of a wait)"
    assert f"rank {late} did not answer within {limit}" in results[1 - late][0][1]


def reset_alone(rank: int, world_size: int) -> Any:
    ctx = context()
    timed_out = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    error = None
    if rank == 0:
        wait_until(has_happened(timed_out))
    else:
        with short_limit(ctx):
            error = raised(ctx.reset)
        ctx.peer_view(timed_out).fill_(1)
    unusable = raised(ctx.barrier)
    ctx.reset()
    ctx.free(timed_out)
    ctx.barrier()
    return error, unusable


def test_a_reset_that_a_rank_does_not_come_to_can_be_repeated(ranks: Callable[[int], Ranks]) -> None:
    (_, at_rank_0), (error, at_rank_1) = ranks(2).call(reset_alone)
    assert error[0] == "PeerError"
    assert "rank 0 did not answer" in error[1]
    assert "reset()" in error[1]
    assert at_rank_1[0] == "PeerError"
    assert at_rank_0[0] == "PeerError"
    assert "rank 1 aborted and waits in reset()" in at_rank_0[1]


def reset_while_the_other_meets(rank: int, world_size: int, resetting: int) -> Any:
    ctx = context()
    ctx.barrier()
    error = None
    if rank == resetting:
        time.sleep(0.2)  # the other waits for it, or will hear of it when it comes
    else:
        error = raised(ctx.barrier)
    ctx.reset()
    ctx.barrier()
    return error


@pytest.mark.parametrize("resetting", [0, 1])
def test_who_waits_for_a_rank_that_resets_hears_of_it_at_once(ranks: Callable[[int], Ranks], resetting: int) -> None:
    results = ranks(2).call(reset_while_the_other_meets, resetting)
    kind, message = results[1 - resetting]
    assert kind == "PeerError"
    assert f"rank {resetting} aborted and waits in reset()" in message  # and not that it did not answer
