"""All-gather + GEMM in torch alone, on one process that has all of A and B: what a rank must get."""

from __future__ import annotations

import torch

from ..common.reference import product
from .problem import AllGatherGemmProblem


def reference(problem: AllGatherGemmProblem, rank: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A (m, k) @ this rank's columns of B (k, n), in fp64, of bf16 and fp16 on GPUs in fp32."""
    return product(a, b[:, slice(*problem.columns(rank))])
