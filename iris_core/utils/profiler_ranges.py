"""Calls in a profiler's timeline: as NVTX ranges (roctx on AMD) on GPUs, as torch.profiler's where there are none."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from .settings import switch_in


class ProfilerRanges:
    """Names stretches of the host's time.

    Args:
        on_gpu: whether the profiler is a GPU's, such as Nsight Systems or rocprofv3.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def range(self, text: str) -> AbstractContextManager[None]:
        """Name what is done within the block."""
        return torch.cuda.nvtx.range(text) if self._on_gpu else torch.profiler.record_function(text)


def profiler_ranges(on_gpu: bool) -> ProfilerRanges | None:
    """Return what ``IRIS_PROFILER_RANGES`` asks for; None, if for nothing.

    Raises:
        ValueError: the variable holds no switch.
    """
    return ProfilerRanges(on_gpu) if switch_in("IRIS_PROFILER_RANGES") else None
