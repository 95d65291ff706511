"""The product that variants are checked against: torch's, on one process, in a wider type than theirs."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a type wide enough to judge `dtype`; not wider on a GPU, where fp64 may be slow."""
    return torch.float64 if device.type == "cpu" or dtype == torch.float32 else torch.float32


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A @ B of the `wide_dtype` of theirs."""
    wide = wide_dtype(a.dtype, a.device)
    return a.to(wide) @ b.to(wide)
