"""The scheduler: tasks that take turns as greenlets, in an order that a seed decides and can repeat."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..interpreter.greenlets import import_greenlet
from ..interpreter.polling import POLLS, Polling
from .clocks import Agent

_POLLS_IN_VAIN = 100  # of a word, by every task, since anything last changed: then nothing ever will
_LOADS_IN_VAIN = 10_000  # plain ones, which no program waits by: compiled, a loop has one of them
_PAUSE = (0, -1)  # in place of an address and a site


@dataclass(frozen=True)
class Schedule:
    """An order of turns.

    The task of the highest priority goes on until it waits, polls, or its priority changes.

    Args:
        name: for reports.
        order: "first": tasks made first go first; "last": the other way round; "random".
        change: probability that a task falls behind all others at an atomic or a poll; a tenth of it at other accesses.
        seed: of all that is random.
        eager: whether a task that polls a word goes on as soon as it changes; it may be too soon.
    """

    name: str
    order: str
    change: float
    seed: int
    eager: bool = False


def make_schedules(count: int, seed: int) -> list[Schedule]:
    """Return this many schedules: in order, reversed, then random ones, coarse and fine."""
    fixed = [
        Schedule("in order", "first", 0.0, seed, eager=True),
        Schedule("reversed", "last", 0.0, seed, eager=True),
    ]
    drawn = [
        Schedule(f"random, seed {seed + index}", "random", (0.02, 0.3)[index % 2], seed + index)
        for index in range(count - len(fixed))
    ]
    return [*fixed, *drawn][:count]


class Task:
    """Something that runs on its own: a rank's host, a stream, a program."""

    def __init__(self, agent: Agent, name: str, greenlet: Any, priority: float) -> None:
        self.agent = agent
        self.name = name
        self.priority = priority
        self.greenlet = greenlet
        self.enter: Callable[[], None] | None = None  # called before each of its turns
        self.ready: Callable[[], bool] | None = None  # what it waits for,
        self.waits_for = ""  # and in words
        self.site: int | None = None  # where what it does was queued
        self.polling = Polling()
        self.polls_since = -1
        self.last_look: tuple[int, int] | None = None  # address and site of its last look at a flag,
        self.look_before: tuple[int, int] | None = None  # and of the last at another one
        self.most_polls = _POLLS_IN_VAIN
        self.modes = _torch_modes()

    def polls_one_of(self, words: Sequence[int]) -> bool:
        """Return whether it has looked at one of these words last, and done nothing new since."""
        look = self.last_look
        return look is not None and look[0] in words and self.polling.saw(look)


class Stuck(Exception):
    """No task can ever go on."""


class Scheduler:
    """Runs tasks until none is left."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._random = random.Random(schedule.seed)
        self._greenlets = import_greenlet()
        self._main = self._greenlets.getcurrent()
        self._lowest = self._highest = 0.0
        self._changes = 0
        self._failure: BaseException | None = None
        self.failed: Task | None = None  # the first task that raised
        self._ended = False
        self.tasks: list[Task] = []
        self.current: Task | None = None

    def spawn(self, agent: Agent, name: str, fn: Callable[[], Any]) -> Task:
        """Add a task, which runs at its first turn."""

        def run() -> None:
            try:
                fn()
            except self._greenlets.GreenletExit:
                pass
            except BaseException as error:
                if self._failure is None:
                    self._failure, self.failed = error, task

        count = len(self.tasks)
        priority = {"first": -count, "last": count, "random": self._random.random()}[self._schedule.order]
        self._highest = max(self._highest, priority)
        task = Task(agent, name, self._greenlets.greenlet(run, self._main), float(priority))
        self.tasks.append(task)
        return task

    def run(self, until: Callable[[], bool]) -> None:
        """Give turns until `until()`.

        Raises:
            Stuck: no task can go on.
            Whatever a task raised.
        """
        while not until():
            ready = [task for task in self.tasks if task.ready is None or task.ready()]
            if not ready or all(self._polls_in_vain(task) for task in ready):
                raise Stuck
            task = max(ready, key=lambda task: task.priority)
            task.ready = None
            self.current = task
            if task.enter is not None:
                task.enter()
            with _in_modes(task.modes):
                task.greenlet.switch()
                task.modes = _torch_modes()
            self.current = None
            if task.greenlet.dead:
                self.tasks.remove(task)
                self.changed()
            if self._failure is not None:
                raise self._failure

    def end(self) -> None:
        """End all tasks, wherever they are."""
        self._ended = True
        for task in self.tasks:
            with _in_modes(task.modes):
                task.greenlet.throw(self._greenlets.GreenletExit)
        self.tasks.clear()

    def changed(self) -> None:
        """Say that something changed that others may wait for."""
        self._changes += 1

    def changed_words(self, addresses: Sequence[int]) -> None:
        """Say that words have changed; an eager schedule lets those who poll one go first."""
        self.changed()
        if not self._schedule.eager:
            return
        polling = [task for task in self.tasks if task is not self.current and task.polls_one_of(addresses)]
        if polling:
            self._highest += 1.0
            for task in polling:
                task.priority = self._highest
            self._give_turn()

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Hold the current task until `ready()`, for `what` in words."""
        if not ready():
            assert self.current is not None
            self.current.ready, self.current.waits_for = ready, what
            self._give_turn()

    def look(self, address: int, site: int, *, is_strong: bool = True) -> None:
        """Say that the current task looks at a word, by an atomic or the like, and let others go on now and then."""
        assert self.current is not None
        if self.current.last_look and self.current.last_look[0] != address:
            self.current.look_before = self.current.last_look
        self.current.last_look = (address, site)
        self.current.most_polls = _POLLS_IN_VAIN if is_strong else _LOADS_IN_VAIN
        self._count((address, site))
        self.maybe_switch(self._schedule.change / (1 if is_strong else 10))

    def at_load(self) -> None:
        """Let others go on, rarely: the current task is about to load data."""
        assert self.current is not None
        self.current.polling.work()
        self.maybe_switch(self._schedule.change / 10)

    def poll(self) -> None:
        """Let the others go on first: the current task polls."""
        assert self.current is not None
        self.current.most_polls = _POLLS_IN_VAIN
        self._count(_PAUSE)
        self._fall_behind()

    def at_access(self) -> None:
        """Let others go on, rarely: the current task is about to change memory."""
        self.changed()
        self.maybe_switch(self._schedule.change / 10)

    def maybe_switch(self, probability: float) -> None:
        """With some probability, let the others go on first."""
        if probability and self._random.random() < probability:
            self._fall_behind()

    def _count(self, look: tuple[int, int]) -> None:
        """Count how often the current task has made a look since anything last changed, or it has worked."""
        task = self.current
        assert task is not None
        if task.polls_since != self._changes:
            task.polling.work()
            task.polls_since = self._changes
        if task.polling.look(look) >= POLLS:  # a loop without a pause must not keep the others from their turns
            self._fall_behind()

    def _polls_in_vain(self, task: Task) -> bool:
        return task.polls_since == self._changes and task.polling.times >= task.most_polls

    def _fall_behind(self) -> None:
        assert self.current is not None
        self._lowest = min(self._lowest, min(task.priority for task in self.tasks)) - 1.0
        self.current.priority = self._lowest
        self._give_turn()

    def _give_turn(self) -> None:
        if self._ended:
            raise self._greenlets.GreenletExit
        self._main.switch()


def _torch_modes() -> tuple[Any, ...]:
    """Return the modes of torch that this thread is in now, for `_in_modes`."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch.is_grad_enabled(), included, excluded


@contextlib.contextmanager
def _in_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    """Within the block, this thread is in these modes, and then in those that it was in, whatever is done meanwhile."""
    is_grad_enabled, included, excluded = modes
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.set_grad_enabled(is_grad_enabled):
        yield
