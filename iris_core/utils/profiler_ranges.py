"""Calls in a profiler's timeline: as NVTX ranges (roctx on AMD) on GPUs, as torch.profiler's where there are none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from .settings import switch_in


def profiler_range(*, on_gpu: bool) -> Callable[[str], AbstractContextManager[None]] | None:
    """Return what names the time within a block, if ``IRIS_PROFILER_RANGES`` asks for that; else None.

    Args:
        on_gpu: whether the profiler is a GPU's, such as Nsight Systems or rocprofv3.

    Raises:
        ValueError: the variable holds no switch.
    """
    if not switch_in("IRIS_PROFILER_RANGES"):
        return None
    return torch.cuda.nvtx.range if on_gpu else torch.profiler.record_function
