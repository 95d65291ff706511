"""The tile-level collectives under the race checker: none races, and without a wait each does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from tile_collectives import COLLECTIVES, Run

import iris_core
from iris_core.checker import check
from iris_core.device import sync
from iris_core.x import epochs, point_to_point

PART = (8, 21)  # of one row of tiles, the last with columns to spare
STAGES = tl.constexpr(4)  # of a call, in the values of its flags


def run(rank: int, world_size: int, name: str, flagged: bool = True) -> None:
    with iris_core.iris(1 << 21) as ctx:
        collective = Run(ctx, COLLECTIVES[name], PART, torch.float32, flagged=flagged)
        for call in (1, 2):
            collective.check(call, torch.float32)
        ctx.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_no_race(name: str, world_size: int) -> None:
    report = check(run, world_size, args=(name,), schedules=2)
    assert report.ok, report


@triton.jit
def no_wait_for_ready(flag_ptr, expected, watchdog_ptr, scope: tl.constexpr):
    if expected % STAGES != 1:
        sync.wait(flag_ptr, expected, watchdog_ptr, scope)


@triton.jit
def no_wait_for_done(flag_ptr, expected, watchdog_ptr, scope: tl.constexpr):
    if expected % STAGES != 2:
        sync.wait(flag_ptr, expected, watchdog_ptr, scope)


@triton.jit
def no_wait_for_later(flag_ptr, expected, watchdog_ptr, scope: tl.constexpr):
    if expected % STAGES != 3:
        sync.wait(flag_ptr, expected, watchdog_ptr, scope)


@triton.jit
def wait_for_some(flags_ptr, expected, rank, world_size, watchdog_ptr):
    """`wait_peers`, by what stands for `wait` meanwhile."""
    for peer in range(world_size):
        if peer != rank:
            epochs.wait(flags_ptr + peer, expected, watchdog_ptr, "sys")


@contextlib.contextmanager
def without(stage: int) -> Iterator[None]:
    """Leave out all waits for a stage."""
    weaker: Any = (None, no_wait_for_ready, no_wait_for_done, no_wait_for_later)[stage]
    with mock.patch.object(epochs, "wait", weaker), mock.patch.object(epochs, "wait_peers", wait_for_some):
        yield


STEPS = [(name, stage) for name, one in COLLECTIVES.items() for stage in one.steps]


@pytest.mark.parametrize(("name", "stage"), STEPS)
def test_every_wait_is_needed(name: str, stage: int) -> None:
    with without(stage):
        report = check(run, 3, args=(name,), schedules=2)
    assert report.races or report.errors  # a race, or already a wrong output


@triton.jit
def no_wait(flag_ptr, expected, watchdog_ptr, scope: tl.constexpr):
    pass


def test_a_message_needs_its_waits() -> None:
    with mock.patch.object(point_to_point, "wait", no_wait):
        assert check(run, 2, args=("messages",), schedules=2).races


@triton.jit
def no_signal(flag_ptr, value, scope: tl.constexpr):
    pass


@pytest.mark.parametrize("name", ["all_reduce_two_shot", "all_reduce_ring", "messages"])
def test_a_missing_signal_is_a_deadlock(name: str) -> None:
    with mock.patch.object(epochs, "signal", no_signal), mock.patch.object(point_to_point, "signal", no_signal):
        assert check(run, 2, args=(name,), schedules=2).deadlocks


def test_without_a_lock_additions_race() -> None:
    with mock.patch("iris_core.x.all_reduce.wait", no_wait):
        # Where all of a rank's call comes before another's, its last flag orders them.
        assert check(run, 3, args=("all_reduce_spinlock",), schedules=6).races
