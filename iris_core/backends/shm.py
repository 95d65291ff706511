"""The heap in shared host memory: every rank a process, kernels run by Triton's interpreter, no GPU.

All heaps are one anonymous file (shared_memory.py), and one mapping of it a rank.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..device.kernel_memory import Span, share, unshare
from ..rendezvous.control_plane import ControlPlane
from ..rendezvous.shared_memory import share_memory
from ..utils.backoff import back_off
from .base import STRIDE_ALIGNMENT, Backend, Stream, round_up

EMULATED_COMPUTE_UNITS = 4  # enough for several programs of each role, few enough to interpret


class ShmBackend(Backend):
    """Heaps in memory that the ranks' processes share; kernels are interpreted, and each has ended once launched."""

    name = "shm"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._shared: list[Span] = []
        self._give_back: Callable[[], object] = lambda: None

    def open_window(self, control_plane: ControlPlane, heap_size: int) -> tuple[torch.Tensor, int]:
        stride = round_up(heap_size, STRIDE_ALIGNMENT)
        window = share_memory(control_plane, stride * control_plane.world_size, "iris_heap")
        # From the file itself: all ranks read zeroes there from then on.
        self._give_back = functools.partial(window.madvise, mmap.MADV_REMOVE, stride * control_plane.rank, stride)
        heaps = torch.frombuffer(window, dtype=torch.uint8)
        self._shared.append(share(heaps, "the ranks' heaps", heaps=control_plane.world_size))
        return heaps, stride

    def release_memory(self) -> None:
        self._give_back()

    def map_memory(self, control_plane: ControlPlane) -> None:
        pass  # the system gives pages as they are used

    def close_window(self) -> None:  # it is unmapped with the last tensor
        while self._shared:
            unshare(self._shared.pop())
        self._give_back = lambda: None

    def synchronize(self) -> None:
        pass

    def make_stream(self, timeout_s: float, timed_out: Callable[[torch.Tensor, int], None]) -> Stream:
        return _ImmediateStream(timeout_s, timed_out)

    def compute_units(self) -> int:
        return EMULATED_COMPUTE_UNITS

    def arch(self) -> str:
        return "cpu"

    def share_with_kernels(self, memory: torch.Tensor) -> int:
        self._shared.append(share(memory, "the fault board"))
        return memory.data_ptr()

    def write_words(self, words: torch.Tensor, value: int) -> None:
        words.fill_(value)

    def identity(self) -> str:
        return ""


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
        deadline = time.monotonic() + self._timeout_s
        looks = 0
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
