"""GEMM + all-reduce in torch alone, on one process that has all of A and B: what every variant is checked against."""

from __future__ import annotations

import torch


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A (m, k) times B (k, n) in fp64 for CPU tensors, in fp32 for GPU tensors."""
    wide = torch.float64 if a.device.type == "cpu" else torch.float32
    return a.to(wide) @ b.to(wide)
