"""The heap in shared host memory: every rank a process, kernels run by Triton's interpreter, no GPU.

A rank's memory is an anonymous file (memfd), which has no name: nothing is left behind however the ranks end.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch

from ..device.kernel_memory import Heaps, Span, share, span_of, unshare
from ..rendezvous.control_plane import ControlPlane
from ..utils.backoff import back_off
from .base import STRIDE_ALIGNMENT, Backend, Memory, Stream, round_up

EMULATED_COMPUTE_UNITS = 4  # enough for several programs of each role, few enough to interpret

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_mmap.restype = ctypes.c_void_p
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class ShmBackend(Backend):
    """Heaps in memory that the ranks' processes share; kernels are interpreted, and each has ended once launched."""

    name = "shm"
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self._shared: list[Span] = []

    def open_window(self, control_plane: ControlPlane, heap_size: int) -> int:
        stride = max(round_up(heap_size, STRIDE_ALIGNMENT), self.reserved_bytes)
        with control_plane.collective_section(f"reserve {stride:,} bytes of addresses a rank"):
            if not control_plane.passes_fds:
                raise RuntimeError("IRIS_TOKEN is set, for ranks of several hosts, which share memory on GPUs alone")
            size = stride * control_plane.world_size
            addresses = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        self._rank = control_plane.rank
        self._window = torch.from_numpy(np.asarray(_Addresses(addresses)))
        self._heaps = Heaps(self._window.data_ptr(), stride, control_plane.world_size)
        return stride

    def window(self) -> torch.Tensor:
        return self._window

    def release_memory(self, offset: int, size: int) -> None:
        # From the file itself: all ranks read zeroes there from then on.
        if _madvise(self._heaps.start + self._rank * self._heaps.stride + offset, size, mmap.MADV_REMOVE):
            raise _error("madvise")

    def map_memory(self, control_plane: ControlPlane, offset: int, size: int) -> None:
        pass  # the system gives pages as they are used

    def close_window(self) -> None:
        self.unmap_all()
        while self._shared:
            unshare(self._shared.pop())

    def own_memory(self, size: int) -> Memory:
        fd = os.memfd_create("iris_heap", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return Memory(((fd, size),))

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        if not storage.is_shared():
            raise ValueError("it is in memory of this process alone; a tensor of share_memory_() can be shared")
        fd, size = storage._share_fd_cpu_()[:2]
        return Memory(((os.dup(fd), size),), tensor.data_ptr() - storage.data_ptr())

    def _export(self, handle: int, shared_by: str) -> int:
        return os.dup(handle)

    def _import(self, received: int, shared_by: str) -> int:
        return os.dup(received)

    def _map_piece(self, rank: int, offset: int, size: int, handle: int) -> Callable[[], object]:
        start = self._heaps.start + rank * self._heaps.stride + offset
        if _mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, handle, 0) == _FAILED:
            raise _error("mmap")
        span = share(Span(start, start + size, "the ranks' heaps", self._window, self._heaps))
        return partial(unshare, span)  # tensors that are left after the context can be read still

    def _release(self, handle: int) -> None:
        os.close(handle)

    def synchronize(self) -> None:
        pass

    def make_stream(self, timeout_s: float, timed_out: Callable[[torch.Tensor, int], None]) -> Stream:
        return _ImmediateStream(timeout_s, timed_out)

    def compute_units(self) -> int:
        return EMULATED_COMPUTE_UNITS

    def arch(self) -> str:
        return "cpu"

    def share_with_kernels(self, memory: torch.Tensor) -> int:
        self._shared.append(share(span_of(memory, "the fault board")))
        return memory.data_ptr()

    def write_words(self, words: torch.Tensor, value: int) -> None:
        words.fill_(value)

    def identity(self) -> str:
        return ""


def _error(call: str) -> OSError:
    return OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


class _Addresses:
    """Reserved addresses as numpy takes them: writable, as they are where memory is mapped. They go with this."""

    def __init__(self, reserved: mmap.mmap) -> None:
        self._reserved = reserved
        shown = np.frombuffer(reserved, np.uint8).__array_interface__
        self.__array_interface__ = {**shown, "data": (shown["data"][0], False)}


class _ImmediateStream(Stream):
    def __init__(self, timeout_s: float, timed_out: Callable[[torch.Tensor, int], None]) -> None:
        self._timeout_s = timeout_s
        self._timed_out = timed_out

    def wait_for_current(self) -> None:
        pass

    def current_waits(self) -> None:
        pass

    def as_current(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        deadline, looks = time.monotonic() + self._timeout_s, 0
        while True:
            is_late = self._timeout_s and time.monotonic() > deadline
            if flag.item() >= value:  # looked at after the clock: what has come in time is seen
                return
            if is_late:
                self._timed_out(flag, value)
                return
            looks += 1
            back_off(looks)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        flag.fill_(value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)
