"""GEMM + all-reduce by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline.

One GEMM and one `all_reduce`, nothing else.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..common.library import LibraryOperator
from .operator import FAMILY
from .problem import GemmAllReduceProblem


class Library(LibraryOperator[GemmAllReduceProblem]):
    """See the module."""

    family = FAMILY
    variant = "library"

    def _open(self) -> None:
        shape, device = self.problem.c_shape(self.rank), self.ctx.get_device()
        self._group = self.ctx.process_group()
        self.output = torch.empty(shape, dtype=self.problem.dtype, device=device)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.mm(a, b, out=self.output)
        dist.all_reduce(self.output, group=self._group)
        return self.output


VARIANT = Library.as_variant("torch.mm, then all_reduce")
