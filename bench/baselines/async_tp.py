"""The `async_tp` baselines: torch's own fused operators over symmetric memory (``torch.ops.symm_mem``)."""

from __future__ import annotations

from typing import TypeVar

import torch

from iris_core import Context
from iris_kernels import all_gather_gemm, gemm_reduce_scatter
from iris_kernels.all_gather_gemm.operator import Gathers
from iris_kernels.all_gather_gemm.problem import AllGatherGemmProblem
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.library import LibraryOperator
from iris_kernels.common.problem import Problem
from iris_kernels.gemm_reduce_scatter.problem import GemmReduceScatterProblem
from overlap_taxonomy import Agent, Arrangement, Sync

P = TypeVar("P", bound=Problem)


class AsyncTpOperator(LibraryOperator[P]):
    """An operator of ``torch.ops.symm_mem``, which allocates its output in every call and takes a contiguous A only."""

    variant = "async_tp"
    place = (Arrangement.OTHERS, Agent.OTHERS, Sync.OTHERS)
    keeps_outputs = False

    @classmethod
    def unsupported_reason(cls, problem: P, config: GemmConfig | None) -> str | None:
        if not torch.cuda.is_available() or torch.version.cuda is None:
            return "torch's fused operators need NVIDIA GPUs"
        if problem.m % problem.world_size:
            return f"torch's fused operators need M ({problem.m}) to be a multiple of the ranks ({problem.world_size})"
        return super().unsupported_reason(problem, config)

    def _open(self) -> None:
        import torch.distributed._symmetric_memory  # noqa: F401  registers the operators

        self._group_name = self.ctx.process_group().group_name


class AsyncTpAllGather(Gathers, AsyncTpOperator[AllGatherGemmProblem]):
    """Torch's fused all-gather and GEMM; `gathered` is the whole A after every call."""

    family = all_gather_gemm.FAMILY

    def __init__(
        self, ctx: Context, problem: AllGatherGemmProblem, config: None = None, *, keep_gathered: bool = False
    ) -> None:
        super().__init__(ctx, problem, config)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.gathered, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(a.contiguous(), [b], 0, self._group_name)
        return output


class AsyncTpReduceScatter(AsyncTpOperator[GemmReduceScatterProblem]):
    """Torch's fused GEMM and reduce-scatter."""

    family = gemm_reduce_scatter.FAMILY

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, self._group_name)


VARIANTS = (
    AsyncTpAllGather.as_variant("torch's fused_all_gather_matmul over symmetric memory"),
    AsyncTpReduceScatter.as_variant("torch's fused_matmul_reduce_scatter over symmetric memory"),
)
