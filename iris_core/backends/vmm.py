"""What CUDA and HIP share: the same virtual-memory calls under two names.

A rank creates physical memory on its GPU, or takes that of another allocator, and exports it as a file descriptor, or
as a fabric handle; every rank reserves one range of addresses, maps all ranks' memory into it side by side, and opens
it to its own GPU. (CUDA driver API, "Virtual Memory Management"; HIP, "Virtual Memory Management API".)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..rendezvous.control_plane import ControlPlane
from .base import STRIDE_ALIGNMENT, Backend, Memory, PreparedStream, Step, round_up

_REGISTER_PORTABLE_AND_MAPPED = 1 | 2  # the same numbers in CUDA and HIP


class Rows(NamedTuple):
    """What is copied where, of rows of one width.

    Args:
        dst, src: addresses.
        dst_pitch, src_pitch: bytes from one row to the next.
        width_bytes, height: of a row, and how many.
    """

    dst: int
    dst_pitch: int
    src: int
    src_pitch: int
    width_bytes: int
    height: int


class VmmBackend(Backend):
    """A GPU's memory through virtual-memory calls; a subclass makes the calls."""

    # What a subclass sets: the driver's description of a rank's memory, and numbers of its own for some arguments.
    _properties: Any
    _fd_type: Any
    _granularity_kind: Any
    _host_calls: str  # what its calls on host memory begin with

    def __init__(self, device_index: int) -> None:
        super().__init__()
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)  # makes the context that the driver's calls below act in
        # For `write_words`: copies from pinned memory on a stream of their own, since a kernel that fills would find no
        # SM free, and torch's streams are a few that all share. All is made and used here, once: a first use can wait
        # for the device (seen on an H200: making a stream waited 20 s for a kernel that spun). The stream ends with the
        # process, as torch's allocator of pinned memory remembers it.
        self._writing = torch.cuda.ExternalStream(self._create_stream(), self.device)
        self._written = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self.write_words(torch.zeros(1, dtype=torch.int64, device=self.device), 0)
        self._shared: list[torch.Tensor] = []
        self._base = self._stride = self._window_size = 0

    def open_window(self, control_plane: ControlPlane, heap_size: int) -> int:
        alignment = max(self._granularity(), STRIDE_ALIGNMENT)
        self._stride = max(round_up(heap_size, alignment), self.reserved_bytes)
        with control_plane.collective_section(f"reserve {self._stride:,} bytes of addresses a rank"):
            self._window_size = self._stride * control_plane.world_size
            self._base = int(self._get("MemAddressReserve", self._window_size, alignment, 0, 0))
        return self._stride

    def window(self) -> torch.Tensor:
        # How torch takes a range of device addresses: CUDA array interface, version 3.
        start, shape = (self._base, False), (self._window_size,)
        array = {"data": start, "shape": shape, "typestr": "|u1", "strides": None, "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=self.device)

    def map_memory(self, control_plane: ControlPlane, offset: int, size: int) -> None:
        super().map_memory(control_plane, offset, size)
        with control_plane.collective_section("zero the heap's memory"):
            self._call("MemsetD8", self._base + control_plane.rank * self._stride + offset, 0, size)
            self.synchronize()

    def close_window(self) -> None:
        self.synchronize()
        self.unmap_all()
        if self._base:
            self._call("MemAddressFree", self._base, self._window_size)
        self._base = 0
        while self._shared:
            self._call(f"{self._host_calls}Unregister", self._shared.pop().data_ptr())

    def own_memory(self, size: int) -> Memory:
        size = round_up(size, self._granularity())
        return Memory(((self._get("MemCreate", size, self._properties, 0), size),))

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        raise ValueError(f"memory of other allocators cannot be shared yet by the {self.name} backend")

    def _granularity(self) -> int:
        return int(self._get("MemGetAllocationGranularity", self._properties, self._granularity_kind))

    def _export(self, handle: Any, shared_by: str) -> Any:
        return int(self._get("MemExportToShareableHandle", handle, self._fd_type, 0))

    def _import(self, received: Any, shared_by: str) -> Any:
        return self._get("MemImportFromShareableHandle", received, self._fd_type)

    def _map_piece(self, rank: int, offset: int, size: int, handle: Any) -> Callable[[], object]:
        address = self._base + rank * self._stride + offset
        self._call("MemMap", address, size, 0, handle, 0)
        try:
            self._open_access(address, size)
        except RuntimeError as error:
            self._call("MemUnmap", address, size)
            raise RuntimeError(
                f"{self.device} has no access to the memory of rank {rank}: {error}; ranks reach each other by peer "
                "access over NVLink, xGMI or PCIe: `iris-bench env` and `nvidia-smi topo -p2p r` show where it is"
            ) from error
        return partial(self._call, "MemUnmap", address, size)

    def _release(self, handle: Any) -> None:
        self._call("MemRelease", handle)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def is_capturing(self) -> bool:
        return torch._C._cuda_isCurrentStreamCapturing()

    def make_stream(self, timeout_s: float, timed_out: Callable[[torch.Tensor, int], None]) -> PreparedStream:
        return GpuStream(self)

    def current_stream(self) -> int:
        """Return the driver's handle of this device's current stream."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def compute_units(self) -> int:
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def share_with_kernels(self, memory: torch.Tensor) -> int:
        self._shared.append(memory)
        address = memory.data_ptr()
        self._call(f"{self._host_calls}Register", address, memory.nbytes, _REGISTER_PORTABLE_AND_MAPPED)
        return int(self._get(f"{self._host_calls}GetDevicePointer", address, 0))

    def write_words(self, words: torch.Tensor, value: int) -> None:
        self._written.fill_(value)
        with torch.cuda.stream(self._writing):
            for word in words:
                word.view(1).copy_(self._written, non_blocking=True)
        self._writing.synchronize()

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    # The driver's calls; each raises RuntimeError with the driver's own words.

    @abstractmethod
    def _call(self, name: str, *arguments: Any) -> None:
        """Make a call, by its name without the driver's prefix: "MemMap" is cuMemMap, or hipMemMap."""

    @abstractmethod
    def _get(self, name: str, *arguments: Any) -> Any:
        """Make a call that gives something, and return that."""

    @abstractmethod
    def _open_access(self, address: int, size: int) -> None: ...

    @abstractmethod
    def _create_stream(self) -> int: ...

    @abstractmethod
    def waiting_for_value(self, stream: int, address: int, value: int) -> Step:
        """Prepare a wait until the 32-bit word at `address` is at least `value`."""

    @abstractmethod
    def writing_value(self, stream: int, address: int, value: int) -> Step:
        """Prepare a write of the 64-bit word at `address`, after a fence over the system."""

    @abstractmethod
    def copying_2d(self, stream: int, rows: Rows) -> Step:
        """Prepare a copy of rows by a copy engine."""

    def order_streams(self, first: int, event: int, then: int) -> None:
        """Hold the stream `then` until all work now in the stream `first` is done, by an event of the driver's."""
        self._call("EventRecord", event, first)
        self._call("StreamWaitEvent", then, event, 0)


class GpuStream(PreparedStream):
    """A side stream of high priority."""

    def __init__(self, backend: VmmBackend) -> None:
        self._backend = backend
        self._stream = torch.cuda.Stream(backend.device, priority=-1)
        self.handle = self._stream.cuda_stream
        # One event is enough: a wait is for what was recorded last before it, whatever is recorded later.
        self._event = torch.cuda.Event()
        self._event.record(self._stream)  # makes it

    def waiting_for_current(self) -> Step:
        return self._fork

    def current_waiting(self) -> Step:
        return self._join

    def as_current(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._stream)

    def waiting_for_value(self, flag: torch.Tensor, value: int) -> Step:
        return self._backend.waiting_for_value(self.handle, flag.data_ptr(), value)

    def writing_value(self, flag: torch.Tensor, value: int) -> Step:
        return self._backend.writing_value(self.handle, flag.data_ptr(), value)

    def copying_2d(self, dst: torch.Tensor, src: torch.Tensor) -> Step:
        width_bytes = src.shape[1] * src.element_size()
        # Of a single row the stride is no matter to torch, but a pitch below the width is one to the driver.
        dst_pitch, src_pitch = (
            width_bytes if len(src) == 1 else matrix.stride(0) * matrix.element_size() for matrix in (dst, src)
        )
        rows = Rows(dst.data_ptr(), dst_pitch, src.data_ptr(), src_pitch, width_bytes, len(src))
        return self._backend.copying_2d(self.handle, rows)

    def _fork(self) -> None:
        self._backend.order_streams(self._backend.current_stream(), self._event.cuda_event, self.handle)

    def _join(self) -> None:
        self._backend.order_streams(self.handle, self._event.cuda_event, self._backend.current_stream())
