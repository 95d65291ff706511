"""GEMM + all-scatter in torch alone, on one process that has all of A and B: what a rank must get."""

from __future__ import annotations

import torch

from ..common.reference import product
from .problem import GemmAllScatterProblem


def reference(problem: GemmAllScatterProblem, rank: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A (m, k) @ B (k, n), whole on every rank, in fp64, of bf16 and fp16 on GPUs in fp32."""
    return product(a, b)
