"""A host with several ranks, all in this process: their hosts, streams and programs are tasks that take turns.

Work is done when its stream gets to it, as on a GPU, not when it is queued: what a rank forgets to wait for is seen to
be missing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime.interpreter import interpreter_builder

from ..backends.base import STRIDE_ALIGNMENT, round_up
from ..backends.shm import ShmBackend
from ..interpreter.memory_bounds import MemoryBounds, span_of
from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.rank_info import RankInfo
from .clocks import Agent, Clock
from .detector import Detector
from .device import CheckedBackend, Queue, SimulatedControlPlane
from .scheduler import Schedule, Scheduler

if TYPE_CHECKING:
    from ..context import Context


class SimulatedHost:
    """The simulated host: hands each rank its place, its group and its device."""

    def __init__(self, world_size: int, schedule: Schedule) -> None:
        self.world_size = world_size
        self.scheduler = Scheduler(schedule)
        self.detector = Detector(self.describe)
        self.contexts: dict[int, Context] = {}
        self.hosts = [self.detector.clocks.add(rank, f"rank {rank}'s host") for rank in range(world_size)]
        self.queues: list[Queue] = []
        self._thread = threading.get_ident()
        self._current = [Queue(self, rank) for rank in range(world_size)]
        self._window: torch.Tensor | None = None
        self._meetings: dict[int, dict[int, tuple[str, Clock]]] = {}
        self._met = [0] * world_size
        self._programs: dict[tuple[int, int, int], Agent] = {}
        self.reach = MemoryBounds()  # held: memory that was freed and handed out again would look like the same bytes

    # What the ranks' contexts ask for --------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank whose task runs now."""
        assert self.scheduler.current is not None, "no rank of the simulated host is running"
        return self.scheduler.current.agent.rank

    def origin(self) -> RankInfo:
        """Return the running rank's place."""
        return RankInfo(self.rank, self.world_size, self.rank, "", "the race checker", node=self)

    def join(self, rank: int) -> ControlPlane:
        """Return a rank's way to talk to the others."""
        return SimulatedControlPlane(self, rank)

    def backend(self, rank: int) -> ShmBackend:
        """Return a rank's device."""
        return CheckedBackend(self, rank)

    def open_window(self, heap_size: int) -> tuple[torch.Tensor, int]:
        """Return the window of all heaps, the same for every rank."""
        stride = round_up(heap_size, STRIDE_ALIGNMENT)
        if self._window is None or self._window.numel() != stride * self.world_size:
            self._window = torch.zeros(stride * self.world_size, dtype=torch.uint8, device="cpu")
            self.reach.add(span_of(self._window, "the ranks' heaps", heaps=self.world_size))
        return self._window, stride

    def meet(self, rank: int, value: Any) -> list[Any]:
        """Return every rank's value once all have come; what each host did before happens before what any does next."""
        meeting = self._meetings.setdefault(self._met[rank], {})
        self._met[rank] += 1
        meeting[rank] = (json.dumps(value), self.detector.clocks.tell(self.hosts[rank]))
        self.scheduler.changed()
        self.scheduler.wait_until(lambda: len(meeting) == self.world_size, "the other ranks' hosts")
        for _, clock in meeting.values():
            self.detector.clocks.hear(self.hosts[rank], clock)
        return [json.loads(meeting[peer][0]) for peer in range(self.world_size)]

    # Work ------------------------------------------------------------------------------------------------------

    def launch(
        self, name: str, fn: Callable[..., None], arguments: dict[str, Any], shape: tuple[int, ...], given: Any
    ) -> None:
        """Queue a grid of programs on the running rank's current stream."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"a thread that a rank has started launches {name}; the race checker follows ranks alone"
            )
        self.reach.add_arguments(given, f"an argument of {name} on rank {self.rank}")
        queue = self._current[self.rank]
        queue.put(lambda: self._run_programs(queue, name, fn, arguments, shape))

    def poll(self) -> None:
        """Let others go on: the running program polls."""
        self.scheduler.poll()

    def synchronize(self, rank: int) -> None:
        """Hold a rank's host until all its streams are idle."""
        queues = [queue for queue in self.queues if queue.rank == rank]
        self.scheduler.wait_until(lambda: all(queue.is_idle for queue in queues), "its device")
        for queue in queues:
            self.detector.clocks.hear(self.hosts[rank], self.detector.clocks.tell(queue.agent))

    def next_in_stream(self) -> Agent:
        """Return who touches memory for a torch operation: the rank's stream, when it gets there."""
        task = self.scheduler.current
        assert task is not None
        if task.agent is not self.hosts[task.agent.rank]:
            return task.agent  # a stream's own copy
        queue = self._current[task.agent.rank]
        self.scheduler.wait_until(lambda: queue.is_idle, "its stream")
        self.detector.clocks.hear(queue.agent, self.detector.clocks.tell(task.agent))
        return queue.agent

    def stream_reached(self) -> None:
        """The running host has read what its stream wrote: it knows what the stream did."""
        rank = self.rank
        clocks = self.detector.clocks
        clocks.hear(self.hosts[rank], clocks.tell(self._current[rank].agent))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether kernels touch this tensor's memory."""
        return self.reach.find(tensor.untyped_storage().data_ptr()) is not None

    def describe(self, address: int) -> str:
        """Say what lies at an address."""
        for context in self.contexts.values():
            if named := context.watchdog.find(address):
                return named
        if (place := self._place_in_window(address)) is not None:
            rank, within = place
            owner = self.contexts.get(rank)
            what = owner.heap.allocator.describe(within) if owner else f"byte {within}"
            return f"{what}, on rank {rank}'s heap"
        if (span := self.reach.find(address)) is not None:
            return f"byte {address - span.start} of {span.name}"
        return f"address {address:#x}"

    @contextlib.contextmanager
    def current_stream(self, queue: Queue) -> Iterator[None]:
        """Make a queue the running rank's current stream."""
        rank = queue.rank
        before, self._current[rank] = self._current[rank], queue
        try:
            yield
        finally:
            self._current[rank] = before

    def current_queue(self, rank: int) -> Queue:
        """Return a rank's current stream."""
        return self._current[rank]

    def _run_programs(
        self,
        queue: Queue,
        name: str,
        fn: Callable[..., None],
        arguments: dict[str, Any],
        shape: tuple[int, ...],
    ) -> None:
        clocks = self.detector.clocks
        start = clocks.tell(queue.agent)
        tasks = []
        for number, index in enumerate(itertools.product(*map(range, shape))):
            key = (queue.rank, queue.number, number)
            if key not in self._programs:
                self._programs[key] = clocks.add_program(queue.rank, f"rank {queue.rank}, {queue.programs} {number}")
            agent = self._programs[key]
            clocks.hear(agent, start)
            clocks.pass_barrier(agent)
            self.detector.store_buffers.begin(agent)
            task = self.scheduler.spawn(agent, f"{agent.name}, of {name}", lambda: fn(**arguments))

            def enter(index: tuple[int, ...] = index) -> None:
                interpreter_builder.set_grid_dim(*shape)
                interpreter_builder.set_grid_idx(*index)

            task.enter = enter
            tasks.append(task)
        self.scheduler.wait_until(lambda: all(task.greenlet.dead for task in tasks), name)
        for task in tasks:
            clocks.hear(queue.agent, clocks.tell(task.agent))

    def _place_in_window(self, address: int) -> tuple[int, int] | None:
        """Return on whose heap an address is, and how far from its start; None if it is on none."""
        if self._window is None:
            return None
        offset = address - self._window.data_ptr()
        return divmod(offset, self._window.numel() // self.world_size) if 0 <= offset < self._window.numel() else None
