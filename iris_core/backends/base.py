"""What the heap asks of a kind of memory."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.unix_socket import close_fds

Step = Callable[[], object]  # queues one thing, as often as it is called

STRIDE_ALIGNMENT = 2 << 20  # bytes; device.rma tells the compiler that heaps are this far apart, or a multiple
FD, FABRIC = "a file descriptor", "a fabric handle"  # by which memory is shared: on a host, and in an NVLink domain


class Memory(NamedTuple):
    """Physical memory of a rank, for consecutive addresses.

    Args:
        pieces: a handle and the bytes behind it, in order of address.
        start: from the beginning of the first piece to what was asked for, in bytes.
        shared_by: `FD` or `FABRIC`.
        free: called when it is mapped no longer, and its handles are released.
    """

    pieces: tuple[tuple[Any, int], ...]
    start: int = 0
    shared_by: str = FD
    free: Callable[[], object] = lambda: None


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
    is_fully_connected = False  # whether each peer is behind a link of its own, which alone carries what goes to it
    # Of addresses a rank, for heaps that grow and for memory of others: more than a GPU has, and less than the 2^40
    # bytes that a tensor descriptor takes as the distance of two peers.
    reserved_bytes = 256 << 30

    def __init__(self) -> None:
        self._segments: dict[int, contextlib.ExitStack] = {}  # by offset in the heap, what unmaps it

    @abstractmethod
    def open_window(self, control_plane: ControlPlane, heap_size: int) -> int:
        """Reserve addresses of one heap per rank, side by side; collective. `map` puts memory behind them.

        Args:
            control_plane: all ranks.
            heap_size: bytes that a heap has at first.

        Returns:
            How many bytes rank r's heap is from rank r + 1's.
        """

    @abstractmethod
    def window(self) -> torch.Tensor:
        """Return all ranks' addresses, uint8, with rank r's heap at ``r * stride``, once the first are mapped."""

    def release_memory(self, offset: int, size: int) -> None:
        """Give this rank's own memory at an offset back, and let go of the peers'; the addresses stay reserved."""
        if offset in self._segments:
            self.unmap(offset)

    def map_memory(self, control_plane: ControlPlane, offset: int, size: int) -> None:
        """Put zeroed memory of every rank's own where `release_memory` has given it back; collective, as is failure."""
        self.map(control_plane, lambda: self.own_memory(size), lambda _: offset)

    @abstractmethod
    def close_window(self) -> None:
        """Unmap and release the window; its tensors are dead after this."""

    @abstractmethod
    def own_memory(self, size: int) -> Memory:
        """Take memory of this rank's device, `size` bytes, rounded up."""

    @abstractmethod
    def memory_of(self, tensor: torch.Tensor) -> Memory:
        """Return the memory that a tensor of another allocator is in.

        Raises:
            ValueError: it cannot be shared with other processes; says why.
        """

    def map(
        self, control_plane: ControlPlane, find: Callable[[], Memory], place: Callable[[int], int]
    ) -> tuple[int, int]:
        """Map memory of every rank at one offset of its heap; collective, and done on all ranks or on none.

        Args:
            control_plane: all ranks.
            find: gives this rank's memory; the handles in it are this function's to release.
            place: gives, for so many bytes, the offset in the heap where they go; the same on all ranks.

        Returns:
            That offset, and how many bytes later what was asked for starts.

        Raises:
            ValueError: what the ranks found is not of the same form.
            RuntimeError: a rank cannot reach another's memory.
        """
        with contextlib.ExitStack() as in_transit, contextlib.ExitStack() as mapped:
            with control_plane.collective_section("find memory for the heap"):
                memory = find()
                mapped.callback(memory.free)
                for handle, _ in memory.pieces:
                    mapped.callback(self._release, handle)
                sent = [self._export(handle, memory.shared_by) for handle, _ in memory.pieces]
                if memory.shared_by == FD:
                    in_transit.callback(close_fds, sent)
            form = [memory.shared_by, memory.start, [size for _, size in memory.pieces]]
            control_plane.agree("how memory is shared, and its start and pieces in bytes,", form)
            at = offset = place(sum(size for _, size in memory.pieces))
            for (own, size), exported in zip(memory.pieces, sent, strict=True):
                if memory.shared_by == FD:
                    received: list[Any] = list(control_plane.exchange_fds(exported))
                    in_transit.callback(close_fds, received)
                else:
                    received = control_plane.all_gather(exported, "exchange fabric handles")
                with control_plane.collective_section("map the peers' heaps"):
                    for peer, one in enumerate(received):
                        handle = own
                        if peer != control_plane.rank:
                            handle = self._import(one, memory.shared_by)
                            mapped.callback(self._release, handle)
                        mapped.callback(self._map_piece(peer, at, size, handle))
                at += size
            self._segments[offset] = mapped.pop_all()
        return offset, memory.start

    def unmap(self, offset: int) -> None:
        """Undo what `map` has done, on this rank, with the place that it was given."""
        self.synchronize()
        self._segments.pop(offset).close()

    def unmap_all(self) -> None:
        """Undo all that `map` has done, on this rank."""
        while self._segments:
            self._segments.popitem()[1].close()

    # Of one piece. -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _export(self, handle: Any, shared_by: str) -> Any:
        """Return a handle as other processes take it: a file descriptor, or what JSON holds."""

    @abstractmethod
    def _import(self, received: Any, shared_by: str) -> Any:
        """Return the handle of what another process has exported."""

    @abstractmethod
    def _map_piece(self, rank: int, offset: int, size: int, handle: Any) -> Callable[[], object]:
        """Map memory at an offset of a rank's heap; return what unmaps it."""

    @abstractmethod
    def _release(self, handle: Any) -> None: ...

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
