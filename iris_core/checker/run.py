"""Running a program of all ranks under the checker."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A context imports these as it opens: by then kernels are interpreted, and what is decorated is so for good.
from ..collectives import ccl as _ccl  # noqa: F401
from ..context.host import on_host
from ..interpreter.patches import executing
from ..utils.settings import is_whole
from ..utils.user_lines import place_of, user_lines
from .detector import Place, Race, describe_place
from .device import Streams
from .executor import SimulatedExecutor
from .memory import TorchWatched, host_reads_watched, kernels_watched
from .scheduler import Schedule, Stuck, Task, make_schedules
from .simulated_host import SimulatedHost
from .simulation import Simulation

DEFAULT_SCHEDULES = 4
_MISSED = (
    "two programs that each write a word and then look at the other's may both see the old value: "
    "{},\n  and {}\n  in two schedules together"
)


@dataclass
class Report:
    """What was found.

    Attributes:
        races: pairs of accesses that nothing orders, each once.
        deadlocks: what each rank waits for where none can go on, by schedule.
        errors: what ranks raised, and where, accesses past tensors of the heap, and acquires that compiled code has
            not, each once.
        schedules: how many were run.
        accesses: memory operations followed, over all of them.
        seconds: how long it took.
    """

    races: list[Race] = field(default_factory=list)
    deadlocks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    schedules: int = 0
    accesses: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not (self.races or self.deadlocks or self.errors)

    @property
    def found_ordering_fault(self) -> bool:
        """Whether a race or a deadlock was found, whatever the outputs were."""
        return bool(self.races or self.deadlocks)

    def __str__(self) -> str:
        found = [*map(str, self.races), *self.deadlocks, *self.errors]
        return "\n".join(found) or f"no race in {self.schedules} schedules, {self.accesses:,} accesses"


def check(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    schedules: int = DEFAULT_SCHEDULES,
    seed: int = 0,
) -> Report:
    """Run ``fn(rank, world_size, *args)`` on all ranks, in this process, and look for races, deadlocks and errors.

    `fn` makes its context with `iris_core.iris`, as on a GPU; its kernels are interpreted. Nothing real is shared and
    nothing waits by the clock. Programs, streams and hosts take turns in an order that the seed decides, a different
    one each schedule.

    Args:
        fn: what every rank does.
        world_size: number of ranks.
        args: further arguments of `fn`.
        schedules: how many orders of turns to try.
        seed: of the random ones.

    Returns:
        What was found. A rank's own exception is among it, unless it comes from outside `fn`.

    Raises:
        ValueError: no ranks or no schedules were asked for.
        RuntimeError: this process has a context, or is checking already.
    """
    if not is_whole(world_size) or not is_whole(schedules):
        raise ValueError(f"world_size is {world_size!r} and schedules {schedules!r}; both take at least 1")
    report = Report()
    start = time.perf_counter()
    raised: dict[tuple[str, str], list[tuple[str, str]]] = {}
    missed: set[tuple[Place, Place]] = set()
    for schedule in make_schedules(schedules, seed):
        missed |= _run(fn, world_size, args, schedule, report, raised)
    report.errors = [_describe_error(*mistake, found) for mistake, found in raised.items()]
    both = [pair for pair in sorted(missed) if pair <= pair[::-1] and pair[::-1] in missed]
    report.errors += dict.fromkeys(_MISSED.format(*map(describe_place, pair)) for pair in both)
    report.seconds = time.perf_counter() - start
    return report


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    schedule: Schedule,
    report: Report,
    raised: dict[tuple[str, str], list[tuple[str, str]]],
) -> set[tuple[Place, Place]]:
    """Run one schedule; what a rank raises goes into `raised`, with the task's name and the schedule's.

    Returns:
        Looks that missed a write; see `Detector.missed_looks`.
    """
    simulation = Simulation(world_size, schedule)
    streams = Streams(simulation)
    scheduler = simulation.scheduler
    with contextlib.ExitStack() as watched:
        watched.enter_context(on_host(SimulatedHost(streams)))
        watched.enter_context(executing(SimulatedExecutor(streams)))
        watched.enter_context(kernels_watched(simulation))
        watched.enter_context(host_reads_watched(streams))
        watched.enter_context(TorchWatched(streams))
        hosts = [
            scheduler.spawn(
                simulation.hosts[rank], f"rank {rank}'s host", functools.partial(fn, rank, world_size, *args)
            )
            for rank in range(world_size)
        ]
        try:
            scheduler.run(
                until=lambda: (
                    all(host.greenlet.dead for host in hosts) and all(queue.is_idle for queue in streams.queues)
                )
            )
        except Stuck:
            report.deadlocks.append(_describe_deadlock(simulation, schedule))
        except Exception as error:
            who = scheduler.failed.name if scheduler.failed else "the checker"
            raised.setdefault(_mistake(simulation, error), []).append((who, schedule.name))
        finally:
            scheduler.end()
            simulation.detector.end()
    report.schedules += 1
    report.accesses += simulation.detector.accesses
    for site, agent in simulation.detector.vain_acquires.items():
        where = simulation.detector.describe_site(site)
        said = f"an acquire whose result is unused is none in compiled code\n  at {where}"
        raised.setdefault(("", said), []).append((agent.name, schedule.name))
    for site, (agent, said) in simulation.detector.strays.items():
        where = simulation.detector.describe_site(site)
        raised.setdefault(("", f"a kernel {said}\n  at {where}"), []).append((agent.name, schedule.name))
    known = {race.sites for race in report.races}
    for where, conflict in simulation.detector.conflicts.values():
        pair = (conflict.earlier, conflict.later)
        if any(simulation.detector.is_of_watchdog(access.site) for access in pair):
            continue
        first, second = sorted(simulation.detector.describe_site(access.site) for access in pair)
        if (first, second) not in known:
            earlier, later = simulation.detector.describe(conflict)
            report.races.append(Race(where, earlier, later, (first, second), schedule.name))
    return simulation.detector.missed_looks()


def _mistake(simulation: Simulation, error: Exception) -> tuple[str, str]:
    """Return the user's line that an error comes from, and what it says; the same for every rank that raises it."""
    said = f"{type(error).__name__}: {error}" if str(error) else _without_words(error)
    where = simulation.detector.describe_raise_site(error)
    lines = user_lines(error)
    return f"{place_of(lines[0])}: " if lines else "", said + (f"\n  at {where}" if where else "")


def _describe_error(place: str, said: str, found: list[tuple[str, str]]) -> str:
    who = found[0][0]
    others = sorted({other for other, _ in found} - {who})
    also = "".join(f"; also {other}" for other in others)
    return f"{place}{who}: {said}\n  in {_listed([name for _, name in found])}{also}"


def _without_words(error: Exception) -> str:
    """Return an exception that says nothing as the line that raised it."""
    lines = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in `{lines[-1].line}`" if lines and lines[-1].line else type(error).__name__


def _listed(names: list[str]) -> str:
    return f"schedule {names[0]}" if len(names) == 1 else f"{len(names)} schedules, the first: {names[0]}"


def _describe_deadlock(simulation: Simulation, schedule: Schedule) -> str:
    waiting = [text for task in simulation.scheduler.tasks if (text := _describe_wait(simulation, task))]
    return "\n  ".join([f"deadlock, schedule {schedule.name}: no task can go on", *waiting])


def _describe_wait(simulation: Simulation, task: Task) -> str | None:
    """Say what a task waits for; None for a stream with nothing to do."""
    if task.ready is not None:
        return f"{task.name} waits for {task.waits_for}" if task.waits_for else None
    looks = [look for look in (task.last_look, task.look_before) if look is not None]
    if not looks:
        return None
    address, site = next((look for look in looks if not simulation.detector.is_of_watchdog(look[1])), looks[0])
    return f"{task.name} waits for {simulation.describe(address)} at {simulation.detector.describe_site(site)}"
