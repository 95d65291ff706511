"""A reset is collective: who comes late, alone, or while the other meets is told so, and a next reset mends it.

The ranks are processes with a limit of one second, as in test_reset.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ranks import LIMIT_S, SOON_S, context, raised


def come_late(rank: int, world_size: int, late: int) -> Any:
    """Rank `late` comes to a barrier when its peer has given up waiting for it there."""
    ctx = context()
    ctx.barrier()
    start = time.monotonic()
    if rank == late:
        time.sleep(2 * LIMIT_S + 1.2)
    error = raised(ctx.barrier)
    seconds = time.monotonic() - start
    unusable = raised(ctx.zeros, 1)
    ctx.reset()
    ctx.barrier()
    ctx.free(ctx.zeros(1))
    return error, seconds, unusable, ctx.broadcast(rank, 1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_named_and_reset_mends_it(impatient: Callable[..., list[Any]], late: int) -> None:
    results = impatient(come_late, late)
    for (kind, message), _, unusable, heard in results:
        assert kind == "PeerError"
        assert "reset()" in message
        assert unusable == (kind, message)
        assert heard == 1
    (_, message), seconds, *_ = results[1 - late]
    assert f"rank {late} did not answer within 2 s" in message
    assert seconds < SOON_S


def reset_alone(rank: int, world_size: int) -> Any:
    ctx = context()
    ctx.barrier()
    error = raised(ctx.reset) if rank == 1 else None
    if rank == 0:
        time.sleep(2.5 * LIMIT_S + 0.5)
    unusable = raised(ctx.barrier)
    ctx.reset()
    ctx.barrier()
    return error, unusable


def test_a_reset_that_a_rank_does_not_come_to_can_be_repeated(impatient: Callable[..., list[Any]]) -> None:
    (_, at_rank_0), (error, at_rank_1) = impatient(reset_alone)
    assert error[0] == "PeerError"
    assert "rank 0 did not answer" in error[1]
    assert "reset()" in error[1]
    assert at_rank_1[0] == "PeerError"
    assert at_rank_0[0] == "PeerError"
    assert "rank 1 has given up and waits in reset()" in at_rank_0[1]


def reset_while_the_other_meets(rank: int, world_size: int, resetting: int) -> Any:
    ctx = context()
    ctx.barrier()
    start, error = time.monotonic(), None
    if rank == resetting:
        time.sleep(0.2)  # the other waits for it
    else:
        error = raised(ctx.barrier)
    ctx.reset()
    seconds = time.monotonic() - start
    ctx.barrier()
    return error, seconds


@pytest.mark.parametrize("resetting", [0, 1])
def test_who_waits_for_a_rank_that_resets_hears_of_it_at_once(
    impatient: Callable[..., list[Any]], resetting: int
) -> None:
    results = impatient(reset_while_the_other_meets, resetting)
    kind, message = results[1 - resetting][0]
    assert kind == "PeerError"
    assert f"rank {resetting} has given up and waits in reset()" in message
    assert all(seconds < LIMIT_S for _, seconds in results)
