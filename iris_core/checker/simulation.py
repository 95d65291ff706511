"""What all parts of a simulated host share: tasks that take turns, the order that is seen, and memory.

All ranks are in this process: their hosts, streams and programs are tasks.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from ..backends.base import STRIDE_ALIGNMENT, round_up
from ..context.host import OpenContext
from ..device.kernel_memory import Heaps, span_of
from ..interpreter.memory_bounds import MemoryBounds
from .clocks import Clock
from .detector import Detector
from .extents import Extents
from .scheduler import Schedule, Scheduler


class Simulation:
    """One schedule of one program of all ranks.

    Args:
        world_size: number of ranks.
        schedule: in which order tasks take turns.

    Attributes:
        hosts: by rank, the agent that its host is.
        contexts: of the ranks that have one.
        bounds: what kernels may access; held, as memory that was freed and handed out again would look the same.
        extents: what of the heaps is a tensor's.
    """

    def __init__(self, world_size: int, schedule: Schedule) -> None:
        self.world_size = world_size
        self.scheduler = Scheduler(schedule)
        self.detector = Detector(self.describe)
        self.hosts = [self.detector.clocks.add(rank, f"rank {rank}'s host") for rank in range(world_size)]
        self.contexts: dict[int, OpenContext] = {}
        self.bounds = MemoryBounds()
        self.extents = Extents()
        self._window: torch.Tensor | None = None
        self._rounds: dict[int, dict[int, tuple[str, Clock]]] = {}
        self._rounds_of = [0] * world_size

    @property
    def rank(self) -> int:
        """The rank whose task runs now."""
        assert self.scheduler.current is not None, "no rank of the simulated host is running"
        return self.scheduler.current.agent.rank

    def open_window(self, heap_size: int) -> tuple[torch.Tensor, int]:
        """Return the window of all heaps, the same for every rank, and their stride."""
        stride = round_up(heap_size, STRIDE_ALIGNMENT)
        if self._window is None or self._window.numel() != stride * self.world_size:
            # NumPy takes zero pages from the system, which take memory where they are written; torch would write all.
            self._window = torch.from_numpy(np.zeros(stride * self.world_size, dtype=np.uint8))
            heaps = Heaps(self._window.data_ptr(), stride, self.world_size)
            self.bounds.add(span_of(self._window, "the ranks' heaps", heaps))
        return self._window, stride

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return every rank's value once all have come; what each host did before happens before what any does next."""
        values = self._rounds.setdefault(self._rounds_of[rank], {})
        self._rounds_of[rank] += 1
        values[rank] = (json.dumps(value), self.detector.clocks.snapshot(self.hosts[rank]))
        self.scheduler.changed()
        self.scheduler.wait_until(lambda: len(values) == self.world_size, "the other ranks' hosts")
        for _, clock in values.values():
            self.detector.clocks.join(self.hosts[rank], clock)
        return [json.loads(values[peer][0]) for peer in range(self.world_size)]

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether kernels touch this tensor's memory."""
        return self.bounds.find(tensor.untyped_storage().data_ptr()) is not None

    def stray(self, addresses: np.ndarray, itemsize: int) -> str | None:
        """Say where on a heap the first of the items at these addresses lies that is no tensor's; None if all are.

        The ranks' heaps are laid out alike, so whose it is goes unsaid.
        """
        if self._window is None:
            return None
        offsets = addresses.astype(np.int64) - self._window.data_ptr()
        within = offsets[(offsets >= 0) & (offsets < self._window.numel())] % self._stride
        outside = self.extents.first_outside(within, itemsize)
        if outside is None:
            return None
        allocators = [context.heap.allocator for context in self.contexts.values()]
        return allocators[0].describe(int(within[outside])) if allocators else f"byte {within[outside]}"

    def describe(self, address: int) -> str:
        """Say what lies at an address."""
        if (place := self._place_in_window(address)) is not None:
            rank, within = place
            owner = self.contexts.get(rank)
            flags = (context.watchdog.find(address) for context in self.contexts.values())
            what = next(filter(None, flags), "") or (
                owner.heap.allocator.describe(within) if owner else f"byte {within}"
            )
            return f"{what}, on rank {rank}'s heap"
        if (span := self.bounds.find(address)) is not None:
            return f"byte {address - span.start} of {span.name}"
        return f"address {address:#x}"

    @property
    def _stride(self) -> int:
        assert self._window is not None
        return self._window.numel() // self.world_size

    def _place_in_window(self, address: int) -> tuple[int, int] | None:
        """Return on whose heap an address is, and how far from its start; None if it is on none."""
        if self._window is None:
            return None
        offset = address - self._window.data_ptr()
        return divmod(offset, self._stride) if 0 <= offset < self._window.numel() else None
