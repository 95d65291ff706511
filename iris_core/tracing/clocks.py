"""Clocks of several devices on one line of time.

Devices' clocks have zeros of their own. Ranks leave a device barrier together, to within its latency, and read their
clocks: the median difference over several barriers is what is taken off, its spread what is said of the accuracy.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..context import Context
from ..device.intrinsics import clock_ns

_BARRIERS = 31


@triton.jit
def clock_kernel(now_ptr):
    """Read the device's clock."""
    tl.store(now_ptr, clock_ns())


def read_clocks(ctx: Context) -> list[int]:
    """Return this device's time after each of some barriers; collective. Interpreted ranks have one clock."""
    if ctx.is_interpreted():
        return [0, 0]
    now = torch.zeros(_BARRIERS, dtype=torch.int64, device=ctx.get_device())
    for index in range(_BARRIERS):
        ctx.device_barrier()
        clock_kernel[(1,)](now[index], num_warps=1)
    ctx.barrier()
    return now.tolist()


def align(clocks: Sequence[Sequence[int]]) -> tuple[list[int], float]:
    """Return each rank's clock less rank 0's, and half the range that nine of ten barriers' differences lie in.

    Args:
        clocks: each rank's time after each barrier; that after the first is left out, which compiles.
    """
    offsets, accuracy = [], 0.0
    for rank in clocks:
        differences = sorted(own - first for own, first in zip(rank[1:], clocks[0][1:], strict=True))
        offsets.append(int(statistics.median(differences)))
        cut = len(differences) // 20
        accuracy = max(accuracy, (differences[-1 - cut] - differences[cut]) / 2)
    return offsets, accuracy
