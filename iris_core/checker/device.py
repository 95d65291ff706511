"""What a rank of the simulated host gets in place of a device and of sockets: queues of work, memory, meetings."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..backends.base import Stream
from ..backends.shm import ShmBackend
from ..heap.heap import address_of
from ..interpreter.memory_bounds import span_of
from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.unix_socket import MessageSocket
from .clocks import SYSTEM, Clock

if TYPE_CHECKING:
    from .simulated_host import SimulatedHost

_COPY_PIECES = 4  # others see a copy half done


class Queue:
    """One stream of a rank: a task that does what was queued, in order."""

    def __init__(self, node: SimulatedHost, rank: int) -> None:
        self._node = node
        self.rank = rank
        self.number = len(node.queues)
        beside = sum(queue.rank == rank for queue in node.queues)  # a rank's first is what it starts with
        self.agent = node.detector.clocks.add(rank, f"rank {rank}'s stream{f' {beside}' if beside else ''}")
        self.programs = f"stream {beside}, program" if beside else "program"
        self._items: deque[tuple[Clock, int, Callable[[], object]]] = deque()
        self._queued = 0
        self._ends: list[Clock] = []  # the queue's clock after each item
        node.queues.append(self)
        self._task = node.scheduler.spawn(self.agent, self.agent.name, self._serve)

    @property
    def is_idle(self) -> bool:
        """Whether all that was queued is done."""
        return len(self._ends) == self._queued

    def put(self, do: Callable[[], object]) -> None:
        """Queue something; what the rank's host did before happens before it."""
        detector = self._node.detector
        self._items.append((detector.clocks.tell(self._node.hosts[self.rank]), detector.site(), do))
        self._queued += 1
        self._node.scheduler.changed()

    def put_wait_for(self, other: Queue) -> None:
        """Queue a wait for all that is in another queue now, and all that torch has done there."""
        clocks = self._node.detector.clocks
        if other.is_idle:  # what torch did last is behind all ends
            now = clocks.tell(other.agent)
            self.put(lambda: clocks.hear(self.agent, now))
            return
        count = other._queued

        def wait() -> None:
            self._node.scheduler.wait_until(lambda: len(other._ends) >= count, other.agent.name)
            clocks.hear(self.agent, other._ends[count - 1])

        self.put(wait)

    def put_wait_value(self, flag: torch.Tensor, value: int) -> None:
        """Queue a wait for a word to be at least `value`. It acquires, as stream memory operations do."""
        node, address, site = self._node, address_of(flag), self._node.detector.site()
        word = ctypes.c_int32.from_address(address)  # no operation of torch's, which would be the host's

        def wait() -> None:
            while word.value < value:
                node.scheduler.look(address, site)
                node.scheduler.poll()
            where = np.array([address], dtype=np.int64)
            node.detector.access(self.agent, where, flag.element_size(), site, write=False, strength=SYSTEM)
            node.detector.releases.acquire(self.agent, address, SYSTEM)

        self.put(wait)

    def put_write_value(self, flag: torch.Tensor, value: int) -> None:
        """Queue a write of a word. It releases, as stream memory operations do."""
        node, address, site = self._node, address_of(flag), self._node.detector.site()
        word = ctypes.c_int64.from_address(address)

        def write() -> None:
            node.scheduler.at_access()
            where = np.array([address], dtype=np.int64)
            node.detector.access(self.agent, where, flag.element_size(), site, write=True, strength=SYSTEM)
            node.detector.releases.overwritten(where)
            node.detector.releases.release(self.agent, address, SYSTEM)
            word.value = value
            node.scheduler.changed()

        self.put(write)

    def put_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy of a matrix, which is not done at once."""

        def copy() -> None:
            for to, come in zip(dst.tensor_split(_COPY_PIECES), src.tensor_split(_COPY_PIECES), strict=True):
                self._node.scheduler.at_access()
                to.copy_(come)

        self.put(copy)

    def _serve(self) -> None:
        clocks = self._node.detector.clocks
        while True:
            self._node.scheduler.wait_until(lambda: bool(self._items), "")
            clock, self._task.site, do = self._items.popleft()
            clocks.hear(self.agent, clock)
            do()
            self._ends.append(clocks.tell(self.agent))
            self._node.scheduler.changed()


class CheckedStream(Stream):
    """See `Stream`."""

    def __init__(self, node: SimulatedHost, rank: int) -> None:
        self._node = node
        self._queue = Queue(node, rank)

    def wait_for_current(self) -> None:
        self._queue.put_wait_for(self._node.current_queue(self._queue.rank))

    def current_waits(self) -> None:
        self._node.current_queue(self._queue.rank).put_wait_for(self._queue)

    def as_current(self) -> AbstractContextManager[None]:
        return self._node.current_stream(self._queue)

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self._queue.put_wait_value(flag, value)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self._queue.put_write_value(flag, value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._queue.put_copy(dst, src)


class CheckedBackend(ShmBackend):
    """The heap of a rank of the simulated host; all ranks' lie in one tensor."""

    def __init__(self, node: SimulatedHost, rank: int) -> None:
        self._node = node
        self._rank = rank

    def open_window(self, group: ControlPlane, heap_size: int) -> tuple[torch.Tensor, int]:
        return self._node.open_window(heap_size)

    def close_window(self) -> None:
        pass  # its end is the node's

    def share_with_kernels(self, memory: torch.Tensor) -> int:
        self._node.reach.add(span_of(memory, "the reports"))
        return memory.data_ptr()

    def synchronize(self) -> None:
        self._node.synchronize(self._rank)

    def make_stream(self, timeout_s: float, timed_out: Callable[[torch.Tensor, int], None]) -> Stream:
        return CheckedStream(self._node, self._rank)


class SimulatedControlPlane(ControlPlane):
    """The ranks of the simulated host; no sockets."""

    def __init__(self, node: SimulatedHost, rank: int) -> None:
        self._node = node
        super().__init__(rank, node.world_size, "", timeout_s=0.0)

    def exchange_fds(self, fd: int | None) -> list[int]:
        fds = [os.dup(one) for one in self._node.meet(self.rank, fd) if one is not None]
        self._node.meet(self.rank, None)  # before anyone closes its own
        return fds

    def _connect(self, address: str) -> dict[int, MessageSocket]:
        return {}

    def _meet(self, epoch: int, what: str, value: Any) -> list[list[Any]]:
        return self._node.meet(self.rank, [what, value])
