"""GEMM + reduce-scatter in torch alone, on one process that has all of A and B: what a rank must get."""

from __future__ import annotations

import torch

from ..common.reference import product
from .problem import GemmReduceScatterProblem


def reference(problem: GemmReduceScatterProblem, rank: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of A (m, k) @ B (k, n), in fp64, of bf16 and fp16 on GPUs in fp32."""
    return product(a[slice(*problem.rows(rank))], b)
