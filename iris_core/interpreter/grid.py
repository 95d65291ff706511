"""The programs of an interpreted grid take turns: one runs until it ends or polls."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton.runtime.interpreter import interpreter_builder

from ..device.interpretation import poll_limits
from ..utils.backoff import back_off
from .greenlets import import_greenlet
from .memory_bounds import MemoryBounds
from .polling import POLLS, Polling


@dataclass
class _Program:
    index: tuple[int, ...]
    greenlet: Any
    polling: Polling = field(default_factory=Polling)
    polled: bytes = b""  # the addresses at which a turn of its loop ends, if it polls
    polls_since: float = 0.0
    looks: int = 0  # in vain, since that at `polled`
    has_paused: bool = False  # since then


class Grid:
    """The programs of one launch, each a greenlet.

    Args:
        fn: a program, called with `arguments`.
        shape: how many there are in each dimension.
        bounds: what they may touch.
    """

    def __init__(
        self, fn: Callable[..., None], arguments: dict[str, Any], shape: tuple[int, ...], bounds: MemoryBounds
    ) -> None:
        greenlet = import_greenlet()
        self.bounds = bounds
        self._scheduler = greenlet.getcurrent()
        self._waiting = [
            _Program(index, greenlet.greenlet(lambda: fn(**arguments)))
            for index in itertools.product(*map(range, shape))
        ]
        self._program: _Program  # whose turn it is

    @property
    def index(self) -> tuple[int, ...]:
        """Which program's turn it is."""
        return self._program.index

    def run(self) -> None:
        """Run all programs to their ends; raises what one of them raises."""
        rounds = 0  # in a row in which no program ended: every one polled, in vain or not
        while self._waiting:
            for program in self._waiting:
                self._program = program
                interpreter_builder.set_grid_idx(*program.index)
                program.greenlet.switch()
            waiting = [program for program in self._waiting if not program.greenlet.dead]
            rounds = rounds + 1 if len(waiting) == len(self._waiting) else 0
            self._waiting = waiting
            if rounds:
                back_off(rounds)

    def pause(self) -> None:
        """Give the turn to the next program: the running one says that it polls."""
        self._program.has_paused = True
        self._scheduler.switch()

    def clock_read(self) -> None:
        """Note that the running program reads the clock: in a loop, which so has a limit of its own, and none here."""
        self._program.polls_since = math.inf

    def follow(self, addresses: np.ndarray, found: Any, *, is_strong: bool) -> None:
        """Give the turn to the next program if the running one polls, and does not say so.

        Args:
            addresses: where it has loaded, stored or updated.
            found: what was there; None if it has stored.
            is_strong: whether that was an atomic, or volatile.

        Raises:
            TimeoutError: it has polled for too long.
        """
        program = self._program
        if found is None or (addresses.size > 1 and not is_strong):  # a store, or data
            program.polling.work()
            return
        if self.bounds.is_heap_bases(int(addresses.flat[0])):  # read in a loop that polls a peer's word
            return
        word = addresses.tobytes()
        times = program.polling.look(word, found.data.tobytes())
        if times < POLLS:
            return
        program.looks += 1
        if times == POLLS:
            program.polls_since = time.monotonic()
        if times == POLLS or program.looks > POLLS:
            program.polled = word
        if word == program.polled:
            self._end_turn_of_loop(program, int(addresses.flat[0]))

    def _end_turn_of_loop(self, program: _Program, address: int) -> None:
        waited_s = time.monotonic() - program.polls_since
        for limit in poll_limits:
            if failure := limit.poll_failure(address, waited_s):
                raise TimeoutError(failure)
        if not program.has_paused:
            self._scheduler.switch()
        program.looks, program.has_paused = 0, False
