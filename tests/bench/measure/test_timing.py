"""How long calls take: with a host that is fast or slow, on a device that is made of numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from iris_kernels.common.calibration import timing
from iris_kernels.common.calibration.timing import Sample

DEVICE_US = 20.0  # what a call takes there
BURST = 10
ROUNDS = 6


class Machine(timing.Clock):
    """A host and a device, each at a moment of its own, in µs; a call takes the host `host_us()` to queue."""

    def __init__(self, host_us: Callable[[], float]) -> None:
        self.host = self.device = 0.0
        self.host_us = host_us
        self.spans = 0

    def sleep(self, us: float) -> None:
        self.spans += 1
        self.device = max(self.device, self.host) + us

    def mark(self) -> float:
        return max(self.device, self.host)

    def has_passed(self, mark: float) -> bool:
        return mark <= self.host

    def elapsed_us(self, begin: float, end: float) -> float:
        return end - begin

    def call(self, a: Any, b: Any) -> None:
        self.host += self.host_us()
        self.device = max(self.device, self.host) + DEVICE_US

    def barrier(self) -> None:
        self.host = self.device = max(self.host, self.device)


def measured(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, rounds: int = ROUNDS, limit_s: float = math.inf
) -> tuple[timing.Times, list[Sample]]:
    ctx: Any = SimpleNamespace(
        is_interpreted=lambda: False,
        device_barrier=lambda: None,
        barrier=machine.barrier,
        control_plane=SimpleNamespace(all_gather=lambda value: [value]),
    )
    monkeypatch.setattr(timing, "DeviceClock", lambda: machine)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: machine.host * 1e-6))
    subject = timing.Subject("subject", machine.call)
    operands: Any = [(0, 0)]
    timing.measure(ctx, [subject], operands, rounds=rounds, burst=BURST, limit_s=limit_s)
    return timing.slowest_medians(ctx, [subject])["subject"], subject.samples


@pytest.mark.parametrize("usual_us", [14.0, 110.0, 1000.0])
def test_what_the_host_takes_is_not_the_devices(monkeypatch: pytest.MonkeyPatch, usual_us: float) -> None:
    """Once in a while a call is queued in half of the time: that says nothing of the others."""
    seed = 1
    print(f"seed {seed}")
    draw = random.Random(seed)
    times, samples = measured(
        monkeypatch,
        Machine(lambda: usual_us * (0.5 if draw.random() < 0.05 else draw.uniform(0.85, 1.15))),
    )
    assert times.time_us == times.latency_us == DEVICE_US
    assert times.remark == ""
    assert len(samples) == ROUNDS


def test_a_round_in_which_the_host_was_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda: 5000.0 if machine.spans % 11 == 0 else 50.0)
    times, samples = measured(monkeypatch, machine, rounds=33)
    assert {held for sample in samples for held in sample.held} == {"time_us", "latency_us"}
    assert all(sample.latency_us > DEVICE_US for sample in samples if "latency_us" in sample.held)
    assert times.time_us == times.latency_us == DEVICE_US
    assert times.remark == ""


def test_a_host_that_is_always_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the device is ever made to wait."""
    times, _ = measured(monkeypatch, Machine(lambda: 2 * timing._MAX_HEAD_START_US / BURST))
    assert times.time_us > DEVICE_US
    assert f"time_us is partly the host's, which was late in {ROUNDS} of {ROUNDS} rounds" in times.remark


def test_there_are_fewer_rounds_within_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds_within(limit_s: float) -> int:
        return len(measured(monkeypatch, Machine(lambda: 1000.0), rounds=100, limit_s=limit_s)[1])

    assert rounds_within(1e-6) == timing.LEAST_ROUNDS
    assert timing.LEAST_ROUNDS < rounds_within(0.5) < 100
    assert rounds_within(1e3) == 100


def test_what_compiles_does_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call of seconds does not have the device sleep so long from then on."""
    calls = itertools.count()
    machine = Machine(lambda: 3e6 if next(calls) == 0 else 10.0)
    slept: list[float] = []
    sleep = machine.sleep
    monkeypatch.setattr(machine, "sleep", lambda us: (slept.append(us), sleep(us)))
    measured(monkeypatch, machine)
    assert max(slept[2:]) < 1000


class HoldingMachine(Machine):
    """A device that holds the host in a call until it has slept, as it does in replays of some graphs."""

    def sleep(self, us: float) -> None:
        super().sleep(us)
        self.awake = self.device

    def call(self, a: Any, b: Any) -> None:
        self.host = max(self.host, self.awake)
        super().call(a, b)


def test_a_call_that_is_held_by_the_device_does_not_lengthen_its_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = HoldingMachine(lambda: 10.0)
    slept: list[float] = []
    sleep = machine.sleep
    monkeypatch.setattr(machine, "sleep", lambda us: (slept.append(us), sleep(us)))
    measured(monkeypatch, machine)
    assert max(slept) < 1000


def test_warm_up_ends_in_time_though_its_rounds_become_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    machine = Machine(lambda: 10.0 if next(calls) < 2 * (BURST + 1) else 5000.0)
    measured(monkeypatch, machine, rounds=1)
    assert machine.host < 2e6 * timing.WARM_UP_S


def test_a_round_is_left_out_on_all_ranks_if_one_was_late() -> None:
    fast = [Sample(1.0, 5.0, 0.1), Sample(2.0, 6.0, 0.1), Sample(9.0, 7.0, 0.1)]
    slow = [Sample(3.0, 5.0, 0.2), Sample(4.0, 6.0, 0.2), Sample(8.0, 7.0, 0.2, ("time_us",))]
    assert timing.steady([fast, slow], "time_us") == ([[1.0, 2.0], [3.0, 4.0]], 0)
    assert timing.steady([fast, slow], "latency_us") == ([[5.0, 6.0, 7.0]] * 2, 0)
    late = [Sample(1.0, 5.0, 0.1, ("time_us",)), Sample(2.0, 6.0, 0.1, ("time_us",)), Sample(9.0, 7.0, 0.1)]
    assert timing.steady([late, slow], "time_us") == ([[1.0, 2.0, 9.0], [3.0, 4.0, 8.0]], 3)


def test_the_slowest_rank_counts_by_its_median() -> None:
    assert timing.slowest_median([[1.0, 2.0, 90.0], [3.0, 3.0, 1.0]]) == 3.0


@pytest.mark.parametrize(("operand_bytes", "count"), [(1, 16), (0, 16), (10 << 20, 10), (50 << 20, 2), (500 << 20, 2)])
def test_operand_sets_pass_twice_through_the_cache(operand_bytes: int, count: int) -> None:
    assert timing.count_sets(operand_bytes=operand_bytes, cache_bytes=50 << 20) == count


@pytest.mark.parametrize("size", range(1, 10))
def test_each_subject_comes_equally_often_after_each_other(size: int) -> None:
    rounds = 2 * size if size % 2 else size
    orders = [timing.balanced(range(size), number) for number in range(rounds)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(pairs) == size * (size - 1)
    assert len(set(pairs.values())) <= 1
    few = Counter(pair for order in orders[: size - 1] for pair in itertools.pairwise(order))
    assert all(count == 1 for count in few.values())
