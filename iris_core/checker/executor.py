"""Runs the grids of interpreted kernels of all ranks, each when its stream gets there, its programs as tasks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from triton.runtime.interpreter import GridExecutor, interpreter_builder

from ..interpreter.executor import Executor, bound_arguments
from ..interpreter.memory_bounds import MemoryBounds
from .clocks import Agent
from .device import Queue, Streams


class SimulatedExecutor(Executor):
    """Queues a launch on the running rank's current stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._simulation = streams.simulation
        self._thread = threading.get_ident()
        self._programs: dict[tuple[int, int, int], Agent] = {}

    @property
    def bounds(self) -> MemoryBounds:
        return self._simulation.bounds

    def pause(self) -> None:
        self._simulation.scheduler.poll()

    def run(self, grid: GridExecutor, args: Any, kwargs: dict[str, Any]) -> None:
        name = grid.fn.__name__
        arguments, shape = bound_arguments(grid, args, kwargs)
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"a thread that a rank has started launches {name}; the race checker follows ranks alone"
            )
        rank = self._simulation.rank
        self.bounds.add_arguments((args, kwargs), f"an argument of {name} on rank {rank}")
        queue, launch = self._streams.current(rank), self._simulation.detector.count_launch(rank, name)
        queue.put(lambda: self._run_programs(queue, name, launch, grid.fn, arguments, shape))

    def _run_programs(
        self,
        queue: Queue,
        name: str,
        launch: int,
        fn: Callable[..., None],
        arguments: dict[str, Any],
        shape: tuple[int, ...],
    ) -> None:
        clocks, scheduler = self._simulation.detector.clocks, self._simulation.scheduler
        start = clocks.snapshot(queue.agent)
        named = name if launch == 1 else f"launch {launch} of {name}"
        tasks = []
        for number, index in enumerate(itertools.product(*map(range, shape))):
            key = (queue.rank, queue.number, number)
            if key not in self._programs:
                self._programs[key] = clocks.add_program(queue.rank, f"rank {queue.rank}, {queue.programs} {number}")
            agent = self._programs[key]
            clocks.join(agent, start)
            clocks.pass_barrier(agent)
            self._simulation.detector.begin(agent, name, launch)
            task = scheduler.spawn(agent, f"{agent.name}, of {named}", lambda: fn(**arguments))

            def enter(index: tuple[int, ...] = index) -> None:
                interpreter_builder.set_grid_dim(*shape)
                interpreter_builder.set_grid_idx(*index)

            task.enter = enter
            tasks.append(task)
        scheduler.wait_until(lambda: all(task.greenlet.dead for task in tasks), named)
        for task in tasks:
            clocks.join(queue.agent, clocks.snapshot(task.agent))
