"""The collectives on whole tensors under the race checker: none races, and without a wait or a signal each does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from host_collectives import COLLECTIVES, Case, check_call

import iris_core
from iris_core.checker import check
from iris_core.collectives import all_reduce, exchange, launches, send_recv
from iris_core.collectives.config import Config

HEAP_BYTES = 4 << 20
RING, TWO_SHOT, COPIES, COPIED_BROADCAST, PIPELINED, PIPELINED_PARTS, GATHERED = (
    (("config", Config(comm_sms=1, **{f"{name}_variant": variant})),)
    for name, variant in (
        ("all_reduce", "ring"),
        ("all_reduce", "two_shot"),
        ("all_gather", "copy_engine"),
        ("broadcast", "copy_engine"),
        ("reduce_scatter", "pipelined"),
        ("all_to_all", "pipelined"),
        ("all_reduce", "gathered"),
    )
)
ONE = (("config", Config(comm_sms=1)),)
# Of 2 KiB a block: several blocks of one program, in calls that use the slots of the calls before.
CASES = {name: Case(name, 1100, options=ONE) for name in COLLECTIVES}
CASES["ring"] = Case("all_reduce", 2000, torch.int32, options=RING)
CASES["pipelined"] = Case("reduce_scatter", 1100, options=PIPELINED)
CASES["pipelined parts"] = Case("all_to_all", 1100, options=PIPELINED_PARTS)
CASES["two_shot"] = Case("all_reduce", 2000, options=TWO_SHOT)
CASES["copies"] = Case("all_gather", 50, symmetric=True, options=COPIES)
CASES["copied broadcast"] = Case("broadcast", 50, symmetric=True, options=COPIED_BROADCAST)
CASES["gathered"] = Case("all_reduce", 1184, symmetric=True, options=GATHERED)
CASES["gathered in place"] = Case("all_reduce", 1200, symmetric=True, in_place=True, options=GATHERED)


def run(rank: int, world_size: int, name: str) -> None:
    with iris_core.iris(HEAP_BYTES) as ctx:
        check_call(ctx, CASES[name], ctx.ccl, list(range(world_size)), None, calls=3)
        ctx.barrier()


def send_round(rank: int, world_size: int) -> None:
    with iris_core.iris(HEAP_BYTES) as ctx:
        ctx.ccl.prepare()
        for call in range(2):
            got = torch.empty(6000)  # more blocks than slots
            if rank == 0:
                ctx.ccl.send(torch.arange(6000) + 1.0 * call, 1, config=Config(comm_sms=1))
            else:
                ctx.ccl.recv(got, 0, config=Config(comm_sms=1))
                assert torch.equal(got, torch.arange(6000) + 1.0 * call)
        ctx.barrier()


@pytest.mark.parametrize("name", CASES)
def test_no_race(name: str) -> None:
    report = check(run, 2, args=(name,), schedules=2)
    assert report.ok, report


def test_messages_do_not_race() -> None:
    report = check(send_round, 2, schedules=2)
    assert report.ok, report


@triton.jit
def no_wait_for_peers(flags_ptr, expected, rank, world_size, watchdog_ptr):
    pass


@triton.jit
def no_wait(flag_ptr, expected, watchdog_ptr):
    pass


@triton.jit
def no_signal(flag_ptrs, value, mask):
    pass


@pytest.mark.parametrize("name", CASES)
def test_the_wait_is_needed(name: str) -> None:
    with (
        mock.patch.object(exchange, "wait_peers", no_wait_for_peers),
        mock.patch.object(all_reduce, "wait_peers", no_wait_for_peers),
    ):
        report = check(run, 2, args=(name,), schedules=2)
    assert report.races or report.errors  # a race, or already a wrong output


def test_copies_of_sums_are_waited_for() -> None:
    with mock.patch.object(launches.Launches, "_barrier", return_value=lambda: None):
        report = check(run, 2, args=("gathered",), schedules=4)
    assert report.races or report.errors


def test_messages_need_their_waits() -> None:
    with mock.patch.object(send_recv, "wait", no_wait):
        report = check(send_round, 2, schedules=2)
    assert report.races or report.errors


@pytest.mark.parametrize("name", ["all_reduce", "two_shot"])
def test_a_missing_signal_is_a_deadlock(name: str) -> None:
    with mock.patch.object(exchange, "signal_each", no_signal):
        assert check(run, 2, args=(name,), schedules=1).deadlocks


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_slot_less_races(depth: int) -> None:
    """Sending one block ahead takes four slots a sender."""
    fewer: Any = tl.constexpr(depth)
    with mock.patch.object(exchange, "DEPTH", fewer):
        assert check(run, 2, args=("all_reduce",), schedules=4).races
