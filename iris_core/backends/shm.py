"""The heap in shared host memory: every rank a process, kernels run by Triton's interpreter, no GPU.

One anonymous file (memfd) and one mapping of it a rank. It never has a name, so nothing is left behind however the
ranks end, and no other user can open it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from contextlib import AbstractContextManager

import torch

from .. import bootstrap
from ..host_group import HostGroup
from .base import STRIDE_ALIGNMENT, Backend, Stream, round_up

EMULATED_COMPUTE_UNITS = 4  # enough for several programs of each role, few enough to interpret


class ShmBackend(Backend):
    """See the module."""

    name = "shm"
    device = torch.device("cpu")

    def open_window(self, group: HostGroup, heap_size: int) -> tuple[torch.Tensor, int]:
        stride = round_up(heap_size, STRIDE_ALIGNMENT)
        size = stride * group.world_size
        own = None
        if group.rank == 0:
            own = os.memfd_create("iris_heap", os.MFD_CLOEXEC)
            os.ftruncate(own, size)
        (fd,) = group.exchange_fds(own)
        window = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        for done in {fd, own} - {None}:
            os.close(done)  # type: ignore[arg-type]
        return window, stride

    def close_window(self) -> None:
        pass  # unmapped with the last tensor

    def synchronize(self) -> None:
        pass

    def make_stream(self) -> Stream:
        return _ImmediateStream()

    def compute_units(self) -> int:
        return EMULATED_COMPUTE_UNITS

    def arch(self) -> str:
        return "cpu"

    def host_visible(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64)

    def identity(self) -> str:
        return ""


class _ImmediateStream(Stream):
    def wait_for_current(self) -> None:
        pass

    def current_waits(self) -> None:
        pass

    def as_current(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        limit = bootstrap.timeout_s()
        deadline = time.monotonic() + limit
        while flag.item() < value:
            if limit and time.monotonic() > deadline:
                raise TimeoutError(f"a stream waited {limit:g} s for a word to reach {value}; it is {flag.item()}")
            os.sched_yield()

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)
