"""What variants are checked against: torch's product, on one process that has all of A and B, in a wider type."""

from __future__ import annotations

import torch

from .problem import Problem


def wide_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a type wide enough to judge `dtype`; not wider on a GPU, where fp64 may be slow."""
    return torch.float64 if device.type == "cpu" or dtype == torch.float32 else torch.float32


def reference(problem: Problem, rank: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what a rank gets of A (m, k) @ B (k, n), of the `wide_dtype` of theirs."""
    wide, (rows, columns) = wide_dtype(a.dtype, a.device), problem.c_bounds(rank)
    return a[slice(*rows)].to(wide) @ b[:, slice(*columns)].to(wide)
