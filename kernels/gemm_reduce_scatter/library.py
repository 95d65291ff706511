"""GEMM + reduce-scatter by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline.

One GEMM and one reduce-scatter, nothing else.
"""

from __future__ import annotations

import torch

from ..common.library import LibraryOperator, reduce_scatter_single
from .operator import FAMILY
from .problem import GemmReduceScatterProblem


class Library(LibraryOperator[GemmReduceScatterProblem]):
    """See the module."""

    family = FAMILY
    variant = "library"

    def _open(self) -> None:
        problem, device = self.problem, self.ctx.get_device()
        self._group = self.ctx.process_group()
        rows = problem.c_shape(0)[0]  # every rank's shard is padded to the largest
        self._partial = torch.zeros(problem.world_size * rows, problem.n, dtype=problem.dtype, device=device)
        self._shard = torch.empty(rows, problem.n, dtype=problem.dtype, device=device)
        self.output = self._shard[: problem.c_shape(self.rank)[0]]

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.mm(a, b, out=self._partial[: self.problem.m])
        reduce_scatter_single(self._shard, self._partial, group=self._group)
        return self.output


VARIANT = Library.as_variant("torch.mm, then reduce_scatter_tensor")
