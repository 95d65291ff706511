"""What the heap asks of a kind of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..rendezvous.control_plane import ControlPlane

Step = Callable[[], object]  # queues one thing, as often as it is called

STRIDE_ALIGNMENT = 2 << 20  # bytes; device.rma tells the compiler that heaps are this far apart, or a multiple


class Stream(ABC):
    """A queue of work beside the current one. Without a GPU, work is done as it is queued."""

    @abstractmethod
    def wait_for_current(self) -> None:
        """Hold this queue until all work now in the current stream is done."""

    @abstractmethod
    def current_waits(self) -> None:
        """Hold the current stream until all work now in this queue is done."""

    @abstractmethod
    def as_current(self) -> AbstractContextManager[None]:
        """Make this queue the current stream within a ``with`` block."""

    @abstractmethod
    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        """Hold this queue until `flag`, one int32 word of this device, is at least `value`.

        A GPU's queue waits without a limit. So the flag must be one that kernels of this rank, queued before, are sure
        to bring there: they count on after a wait of theirs has failed.
        """

    @abstractmethod
    def write_value(self, flag: torch.Tensor, value: int) -> None:
        """Set `flag`, one int64 word of any rank's heap.

        Edge: all work now in this queue, its copies to peers too, happens before what follows a `wait` of whatever
        rank that sees `value`.
        """

    @abstractmethod
    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy a matrix by a copy engine: 2-D, same shape and dtype, rows contiguous, any row stride."""


class PreparedStream(Stream):
    """A stream whose operations can be prepared: what takes the host time is done once, what is returned only queues.

    Attributes:
        handle: the driver's.
    """

    handle: int

    @abstractmethod
    def waiting_for_current(self) -> Step:
        """Prepare `wait_for_current`; the current stream is the one current when the step is called."""

    @abstractmethod
    def current_waiting(self) -> Step:
        """Prepare `current_waits`, likewise."""

    @abstractmethod
    def waiting_for_value(self, flag: torch.Tensor, value: int) -> Step:
        """Prepare `wait_value`."""

    @abstractmethod
    def writing_value(self, flag: torch.Tensor, value: int) -> Step:
        """Prepare `write_value`."""

    @abstractmethod
    def copying_2d(self, dst: torch.Tensor, src: torch.Tensor) -> Step:
        """Prepare `copy_2d`. The step keeps the addresses and not the tensors."""

    def wait_for_current(self) -> None:
        self.waiting_for_current()()

    def current_waits(self) -> None:
        self.current_waiting()()

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self.waiting_for_value(flag, value)()

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self.writing_value(flag, value)()

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copying_2d(dst, src)()


class Backend(ABC):
    """One kind of memory: makes the window of all ranks' heaps, and queues of work that reach it."""

    name: str
    device: torch.device
    storages_are_whole = False  # whether the storage of each tensor on the heap must be as large as the window
    streams_need_a_unit = False  # whether what a stream does beside kernels may be a kernel: a copy, a written value

    @abstractmethod
    def open_window(self, control_plane: ControlPlane, heap_size: int) -> tuple[torch.Tensor, int]:
        """Reserve and share one heap a rank; collective.

        Args:
            control_plane: all ranks.
            heap_size: bytes a rank; rounded up.

        Returns:
            The window, uint8 of ``world_size * stride`` bytes with rank r's heap at ``r * stride``, and the stride.
        """

    @abstractmethod
    def release_memory(self) -> None:
        """Give this rank's part of the window's memory back; its addresses stay reserved."""

    @abstractmethod
    def map_memory(self, control_plane: ControlPlane) -> None:
        """Put zeroed memory behind the window's addresses, of all ranks; collective, as is what failed of it."""

    @abstractmethod
    def close_window(self) -> None:
        """Unmap and release the window; its tensors are dead after this."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work queued on the device."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured in a graph."""
        return False

    @abstractmethod
    def make_stream(self, timeout_s: float, timed_out: Callable[[torch.Tensor, int], None]) -> Stream:
        """Return a new queue, of high priority where there are priorities.

        Args:
            timeout_s: limit of `Stream.wait_value` where the host does the waiting; 0 for none.
            timed_out: called with the flag and the value when it has passed; the queue then goes on.
        """

    @abstractmethod
    def compute_units(self) -> int:
        """Return the number of SMs or compute units; without a GPU, how many programs to emulate."""

    @abstractmethod
    def arch(self) -> str:
        """Return what kernels are compiled for: "sm_90", "gfx942", …, or "cpu"."""

    @abstractmethod
    def share_with_kernels(self, memory: torch.Tensor) -> int:
        """Let kernels write host memory, whole pages, while the host reads it; return its address in kernels."""

    @abstractmethod
    def write_words(self, words: torch.Tensor, value: int) -> None:
        """Set int64 words of any ranks' heaps at once, though kernels that wait for them fill the device."""

    @abstractmethod
    def identity(self) -> str:
        """Return a name of the device that no other device of this host has; empty if ranks may share it."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
