"""What a rank of the simulated host has in place of a device: queues of work, and memory.

Work is done when its stream gets to it, as on a GPU, not when it is queued: what a rank forgets to wait for is seen to
be missing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch

from ..backends.base import Memory, Stream
from ..backends.shm import ShmBackend
from ..device.kernel_memory import span_of
from ..heap.heap import address_of
from ..rendezvous.control_plane import ControlPlane
from .clocks import SYSTEM, Agent, Clock
from .simulation import Simulation

_COPY_PIECES = 4  # others see a copy half done


class Queue:
    """One stream of a rank: a task that does what was queued, in order."""

    def __init__(self, streams: Streams, rank: int) -> None:
        self._simulation = simulation = streams.simulation
        self.rank = rank
        self.number = len(streams.queues)
        beside = sum(queue.rank == rank for queue in streams.queues)  # a rank's first is what it starts with
        self.agent = simulation.detector.clocks.add(rank, f"rank {rank}'s stream{f' {beside}' if beside else ''}")
        self.programs = f"stream {beside}, program" if beside else "program"
        self._items: deque[tuple[Clock, int, Callable[[], object]]] = deque()
        self._queued = 0
        self._ends: list[Clock] = []  # the queue's clock after each item
        streams.queues.append(self)
        self._task = simulation.scheduler.spawn(self.agent, self.agent.name, self._serve)

    @property
    def is_idle(self) -> bool:
        """Whether all that was queued is done."""
        return len(self._ends) == self._queued

    def put(self, do: Callable[[], object]) -> None:
        """Queue something; what the rank's host did before happens before it."""
        detector = self._simulation.detector
        self._items.append((detector.clocks.snapshot(self._simulation.hosts[self.rank]), detector.site(), do))
        self._queued += 1
        self._simulation.scheduler.changed()

    def put_wait_for(self, other: Queue) -> None:
        """Queue a wait for all that is in another queue now, and all that torch has done there."""
        clocks = self._simulation.detector.clocks
        if other.is_idle:  # what torch did last is behind all ends
            now = clocks.snapshot(other.agent)
            self.put(lambda: clocks.join(self.agent, now))
            return
        count = other._queued

        def wait() -> None:
            self._simulation.scheduler.wait_until(lambda: len(other._ends) >= count, other.agent.name)
            clocks.join(self.agent, other._ends[count - 1])

        self.put(wait)

    def put_wait_value(self, flag: torch.Tensor, value: int) -> None:
        """Queue a wait for a word to be at least `value`. It acquires, as stream memory operations do."""
        simulation, address, site = self._simulation, address_of(flag), self._simulation.detector.site()
        word = ctypes.c_int32.from_address(address)  # no operation of torch's, which would be the host's

        def look() -> bool:
            where = np.array([address], dtype=np.int64)
            simulation.detector.access(self.agent, where, flag.element_size(), site, write=False, strength=SYSTEM)
            return word.value >= value

        def wait() -> None:
            while not look():
                simulation.scheduler.look(address, site)
                simulation.scheduler.poll()
            simulation.detector.releases.acquire(self.agent, address, SYSTEM, awaited=value)

        self.put(wait)

    def put_write_value(self, flag: torch.Tensor, value: int) -> None:
        """Queue a write of a word. It releases, as stream memory operations do."""
        simulation, address, site = self._simulation, address_of(flag), self._simulation.detector.site()
        word = ctypes.c_int64.from_address(address)

        def write() -> None:
            simulation.scheduler.at_access()
            where = np.array([address], dtype=np.int64)
            simulation.detector.access(self.agent, where, flag.element_size(), site, write=True, strength=SYSTEM)
            simulation.detector.releases.overwritten(where)
            simulation.detector.releases.update(self.agent, address, value, SYSTEM, releases=True)
            word.value = value
            simulation.scheduler.changed()

        self.put(write)

    def put_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy of a matrix, which is not done at once."""

        def copy() -> None:
            for to, come in zip(dst.tensor_split(_COPY_PIECES), src.tensor_split(_COPY_PIECES), strict=True):
                self._simulation.scheduler.at_access()
                to.copy_(come)

        self.put(copy)

    def _serve(self) -> None:
        clocks = self._simulation.detector.clocks
        while True:
            self._simulation.scheduler.wait_until(lambda: bool(self._items), "")
            clock, self._task.site, do = self._items.popleft()
            clocks.join(self.agent, clock)
            do()
            self._ends.append(clocks.snapshot(self.agent))
            self._simulation.scheduler.changed()


class Streams:
    """The streams of all ranks, and which one is each rank's current one."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.queues: list[Queue] = []
        self._current = [Queue(self, rank) for rank in range(simulation.world_size)]

    def current(self, rank: int) -> Queue:
        """Return a rank's current stream."""
        return self._current[rank]

    @contextlib.contextmanager
    def switched_to(self, queue: Queue) -> Iterator[None]:
        """Within the block, a queue is its rank's current stream."""
        rank = queue.rank
        before, self._current[rank] = self._current[rank], queue
        try:
            yield
        finally:
            self._current[rank] = before

    def synchronize(self, rank: int) -> None:
        """Hold a rank's host until all its streams are idle."""
        simulation = self.simulation
        queues = [queue for queue in self.queues if queue.rank == rank]
        simulation.scheduler.wait_until(lambda: all(queue.is_idle for queue in queues), "its device")
        for queue in queues:
            simulation.detector.clocks.join(simulation.hosts[rank], simulation.detector.clocks.snapshot(queue.agent))

    def next_in_stream(self) -> Agent:
        """Return the agent that touches memory for a torch operation: the rank's stream, when it gets there."""
        simulation, task = self.simulation, self.simulation.scheduler.current
        assert task is not None
        if task.agent is not simulation.hosts[task.agent.rank]:
            return task.agent  # a stream's own copy
        queue = self._current[task.agent.rank]
        simulation.scheduler.wait_until(lambda: queue.is_idle, "its stream")
        simulation.detector.clocks.join(queue.agent, simulation.detector.clocks.snapshot(task.agent))
        return queue.agent

    def stream_reached(self) -> None:
        """The running host has read what its stream wrote: it knows what the stream did."""
        rank, clocks = self.simulation.rank, self.simulation.detector.clocks
        clocks.join(self.simulation.hosts[rank], clocks.snapshot(self._current[rank].agent))


class CheckedStream(Stream):
    """A queue of work whose order, and waits for words, the checker follows."""

    def __init__(self, streams: Streams, rank: int) -> None:
        self._streams = streams
        self._queue = Queue(streams, rank)

    def wait_for_current(self) -> None:
        self._queue.put_wait_for(self._streams.current(self._queue.rank))

    def current_waits(self) -> None:
        self._streams.current(self._queue.rank).put_wait_for(self._queue)

    def as_current(self) -> AbstractContextManager[None]:
        return self._streams.switched_to(self._queue)

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self._queue.put_wait_value(flag, value)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self._queue.put_write_value(flag, value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._queue.put_copy(dst, src)


class CheckedBackend(ShmBackend):
    """The heap of a rank of the simulated host; all ranks' lie in one tensor."""

    def __init__(self, streams: Streams, rank: int) -> None:
        super().__init__()
        self._streams = streams
        self._simulation = streams.simulation
        self._rank = rank

    def open_window(self, control_plane: ControlPlane, heap_size: int) -> int:
        self._window, self._stride = self._simulation.open_window(heap_size)
        return self._stride

    def release_memory(self, offset: int, size: int) -> None:
        self._window.narrow(0, self._rank * self._stride + offset, size).zero_()

    def close_window(self) -> None:
        pass  # its end is the simulation's

    def map(
        self, control_plane: ControlPlane, find: Callable[[], Memory], place: Callable[[int], int]
    ) -> tuple[int, int]:
        return place(sum(size for _, size in find().pieces)), 0  # all of the window has memory from the start

    def own_memory(self, size: int) -> Memory:
        return Memory(((None, size),))

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        raise ValueError("the race checker follows the heap's own memory alone")

    def share_with_kernels(self, memory: torch.Tensor) -> int:
        self._simulation.bounds.add(span_of(memory, "the fault board"))
        return memory.data_ptr()

    def synchronize(self) -> None:
        self._streams.synchronize(self._rank)

    def make_stream(self, timeout_s: float, timed_out: Callable[[torch.Tensor, int], None]) -> Stream:
        return CheckedStream(self._streams, self._rank)
