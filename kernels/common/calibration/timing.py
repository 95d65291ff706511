"""How long calls take: the variants of one problem interleaved, round by round, so that all see the same machine.

A round measures every subject twice: a burst of calls back to back (`time_us`), and one call alone (`latency_us`), each
after a barrier of all ranks on the device. On a GPU nothing waits for the host: the calls are queued while the device
sleeps, before the barrier, so that times are the device's; the host's own time to queue a call is reported beside them.
How long it sleeps goes by what the host took of late. What a call takes that the device holds until it is awake, as it
does replays of some graphs, does not count, or each sleep would be longer than the last. Where the host was late all
the same, on any rank, the round is left out; where it was in most of them, that is said. A rank's time is the median
over rounds, the result the slowest rank's.

Operands rotate through several sets, so that a call does not find in the cache what the last one read. The order of the
subjects changes so that each comes equally often after each other: whoever follows a subject that keeps the multipliers
idle finds the device cooler and its clock higher, by up to a tenth.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from iris_core import Context

Operands = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")

QUANTITIES = ("time_us", "latency_us", "host_us")  # of a `Sample`
PARTLY_THE_HOSTS = "is partly the host's"  # what a remark says of such a time
WARM_UP_S = 0.2  # of this problem's own work: long enough for clocks to settle
MAX_WARM_UP_ROUNDS = 100
LEAST_ROUNDS = 4  # within a limit of time
MIN_SETS, MAX_SETS = 2, 16
_LEAST_HEAD_START_US = 100.0
_MAX_HEAD_START_US = 60_000.0  # ten steps of layers that the host dispatches one operation after the other
_HEAD_START = 1.5  # times the longest of the last few: a host is not equally fast every time
_LAST_FEW = 4
_SLEEP_CYCLES_PER_US = 2000  # a GPU clock of 2 GHz; a slower one sleeps longer, which does no harm


@dataclass
class Subject:
    """Something to time: ``call(a, b)`` queues it once."""

    name: str
    call: Callable[[torch.Tensor, torch.Tensor], object]
    samples: list[Sample] = field(default_factory=list)
    recent: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_LAST_FEW)))

    def head_start_us(self, calls: int) -> float:
        """Return for how long the device should wait, by what it took the host of late to queue so many calls."""
        return min(_LEAST_HEAD_START_US + _HEAD_START * max(self.recent[calls], default=0.0), _MAX_HEAD_START_US)


@dataclass(frozen=True)
class Sample:
    """One rank's times in one round, in µs per call; `held` names those in which the device may have waited for it."""

    time_us: float
    latency_us: float
    host_us: float
    held: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """What a subject takes; `remark` says where that is not the device's alone."""

    remark: str
    time_us: float
    latency_us: float
    host_us: float


class Clock(ABC):
    """Marks moments on the device's own line of time."""

    @abstractmethod
    def sleep(self, us: float) -> None:
        """Hold the device, not the host, for about this long."""

    @abstractmethod
    def mark(self) -> Any:
        """Mark the moment at which the work queued so far is done."""

    @abstractmethod
    def has_passed(self, mark: Any) -> bool:
        """Whether the device has got there, and may have been waiting since."""

    @abstractmethod
    def elapsed_us(self, begin: Any, end: Any) -> float:
        """Return the time between two marks that have passed."""


class DeviceClock(Clock):
    """A GPU's, by events on the current stream."""

    def sleep(self, us: float) -> None:
        torch.cuda._sleep(int(us * _SLEEP_CYCLES_PER_US))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def elapsed_us(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) * 1e3


class HostClock(Clock):
    """The wall clock: interpreted kernels are done when the call returns."""

    def sleep(self, us: float) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        return False  # there is no device that could wait

    def elapsed_us(self, begin: float, end: float) -> float:
        return (end - begin) * 1e6


def count_sets(*, operand_bytes: int, cache_bytes: int) -> int:
    """Return how many sets of operands to rotate through: enough to pass twice through the cache, within bounds."""
    return min(MAX_SETS, max(MIN_SETS, math.ceil(2 * cache_bytes / max(operand_bytes, 1))))


def measure(
    ctx: Context,
    subjects: Sequence[Subject],
    sets: Sequence[Operands],
    *,
    rounds: int,
    burst: int,
    limit_s: float = math.inf,
) -> None:
    """Fill the subjects' samples; collective. Every rank must give the same subjects in the same order.

    Args:
        ctx: the context.
        subjects: what to time.
        sets: this rank's operands to rotate through.
        rounds: samples of each subject.
        burst: calls back to back in a sample; with 1, `latency_us` is `time_us`.
        limit_s: after so long, on any rank, there are no more rounds, if there have been `LEAST_ROUNDS`.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
    """
    clock: Clock = HostClock() if ctx.is_interpreted() else DeviceClock()
    operands = itertools.cycle(sets)
    if not ctx.is_interpreted():
        _warm_up(ctx, clock, subjects, operands, burst)
    start = time.perf_counter()
    for number in range(rounds):
        if number >= LEAST_ROUNDS and limit_s < math.inf and _longest(ctx, start) > limit_s:
            break
        _round(ctx, clock, balanced(subjects, number), operands, burst)


def slowest_medians(ctx: Context, subjects: Sequence[Subject]) -> dict[str, Times]:
    """Return each subject's times: the slowest rank's medians over rounds; collective."""
    by_rank = ctx.control_plane.all_gather(
        {subject.name: [asdict(one) for one in subject.samples] for subject in subjects}
    )
    found = {}
    for subject in subjects:
        samples = [[Sample(**one) for one in ranks[subject.name]] for ranks in by_rank]
        medians, remarks = {}, []
        for quantity in QUANTITIES:
            values, held = steady(samples, quantity)
            medians[quantity] = slowest_median(values)
            if held:
                remarks.append(f"{quantity} {PARTLY_THE_HOSTS}, which was late in {held} of {len(samples[0])} rounds")
        found[subject.name] = Times("; ".join(remarks), **medians)
    return found


def slowest_ranges(ctx: Context, subjects: Sequence[Subject]) -> dict[str, tuple[float, float]]:
    """Return each subject's shortest and longest `time_us` of a round, each round's the slowest rank's; collective."""
    by_rank = ctx.control_plane.all_gather(
        {subject.name: [sample.time_us for sample in subject.samples] for subject in subjects}
    )
    found = {}
    for subject in subjects:
        rounds = [max(times) for times in zip(*(ranks[subject.name] for ranks in by_rank), strict=True)]
        found[subject.name] = (min(rounds), max(rounds))
    return found


def steady(samples_by_rank: Sequence[Sequence[Sample]], quantity: str) -> tuple[list[list[float]], int]:
    """Return each rank's values of the rounds in which no rank's host was late, and 0.

    Where that were less than half of the rounds: those of all rounds, and in how many a host was late.
    """
    rounds = list(zip(*samples_by_rank, strict=True))
    in_time = [one for one in rounds if not any(quantity in sample.held for sample in one)]
    is_enough = 2 * len(in_time) >= len(rounds)
    taken = in_time if is_enough else rounds
    values = [[getattr(sample, quantity) for sample in samples] for samples in zip(*taken, strict=True)]
    return values, 0 if is_enough else len(rounds) - len(in_time)


def slowest_median(samples_by_rank: Sequence[Sequence[float]]) -> float:
    """Return the largest of the ranks' medians."""
    return max(statistics.median(samples) for samples in samples_by_rank)


def balanced(subjects: Sequence[T], number: int) -> list[T]:
    """Return the order of a round: over n rounds each subject comes once after each other (n odd: twice over 2n).

    A Williams design: 0, 1, -1, 2, -2, …, shifted by one from round to round; for odd n each also backwards. In fewer
    rounds no subject comes twice after the same one, for odd n up to n - 1 of them.
    """
    size = len(subjects)
    shift, is_backwards = (number // 2, number % 2) if size % 2 else (number, 0)
    order = [subjects[((i + 1) // 2 * (1 if i % 2 else -1) + shift) % size] for i in range(size)]
    return order[::-1] if is_backwards else order


def _warm_up(ctx: Context, clock: Clock, subjects: Sequence[Subject], operands: Iterator[Operands], burst: int) -> None:
    _round(ctx, clock, subjects, operands, burst)
    for subject in subjects:
        subject.recent.clear()  # what compiles, does so once
    start = time.perf_counter()
    for _ in range(MAX_WARM_UP_ROUNDS):
        _round(ctx, clock, subjects, operands, burst)
        if _longest(ctx, start) > WARM_UP_S:
            break
    for subject in subjects:
        subject.samples.clear()


def _longest(ctx: Context, start: float) -> float:
    """Return the seconds since `start` on the rank where they are most: all ranks do equally many rounds."""
    return max(ctx.control_plane.all_gather(time.perf_counter() - start))


def _round(ctx: Context, clock: Clock, subjects: Sequence[Subject], operands: Iterator[Operands], burst: int) -> None:
    spans = []
    for subject in subjects:
        many = _span(ctx, clock, subject, operands, burst)
        spans.append((subject, many, many if burst == 1 else _span(ctx, clock, subject, operands, 1)))
    ctx.barrier()  # the marks have passed, and no wait has failed
    for subject, many, one in spans:
        time_us = clock.elapsed_us(many.begin, many.end) / burst
        held = tuple(name for name, span in (("time_us", many), ("latency_us", one)) if span.is_held)
        subject.samples.append(Sample(time_us, clock.elapsed_us(one.begin, one.end), many.queue_us, held))


@dataclass(frozen=True)
class _Span:
    begin: Any
    end: Any
    queue_us: float  # a call
    is_held: bool


def _span(ctx: Context, clock: Clock, subject: Subject, operands: Iterator[Operands], calls: int) -> _Span:
    sleeping, sleep_us = time.perf_counter(), subject.head_start_us(calls)
    clock.sleep(sleep_us)
    ctx.device_barrier()
    begin = clock.mark()
    queueing = time.perf_counter()
    for _ in range(calls):
        subject.call(*next(operands))
    queued = time.perf_counter()
    is_held = clock.has_passed(begin)
    subject.recent[calls].append(max((queued - sleeping) * 1e6 - sleep_us * is_held, 0.0))
    return _Span(begin, clock.mark(), (queued - queueing) * 1e6 / calls, is_held)
