"""All-gather + GEMM by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline.

One `all_gather_into_tensor` and one GEMM, nothing else.
"""

from __future__ import annotations

import torch

from iris_core import Context

from ..common.library import LibraryOperator, all_gather_single
from .operator import FAMILY, Gathers
from .problem import AllGatherGemmProblem


class Library(Gathers, LibraryOperator[AllGatherGemmProblem]):
    """See the module. `gathered` is the whole A after every call."""

    family = FAMILY
    variant = "library"

    def __init__(
        self, ctx: Context, problem: AllGatherGemmProblem, config: None = None, *, keep_gathered: bool = False
    ) -> None:
        self.keep_gathered = keep_gathered
        super().__init__(ctx, problem, config)

    def _open(self) -> None:
        problem, device = self.problem, self.ctx.get_device()
        self._group = self.ctx.process_group()
        rows = problem.a_shape(0)[0]  # every rank's shard is padded to the largest
        self._padded = torch.zeros(rows, problem.k, dtype=problem.dtype, device=device)
        self._all = torch.empty(problem.world_size * rows, problem.k, dtype=problem.dtype, device=device)
        self.gathered = self._all[: problem.m]  # shards but the last ones are full, so padding comes last
        self.output = torch.empty(problem.c_shape(self.rank), dtype=problem.dtype, device=device)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if len(a) < len(self._padded) or not a.is_contiguous():
            self._padded[: len(a)].copy_(a)
            a = self._padded
        all_gather_single(self._all, a, group=self._group)
        return torch.mm(self.gathered, b, out=self.output)


VARIANT = Library.as_variant("all_gather_into_tensor, then torch.mm")
