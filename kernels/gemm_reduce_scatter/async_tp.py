"""GEMM + reduce-scatter by torch's fused operator (``torch.ops.symm_mem.fused_matmul_reduce_scatter``)."""

from __future__ import annotations

import torch

from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from ..common.async_tp import AsyncTpOperator
from .operator import FAMILY
from .problem import GemmReduceScatterProblem


class AsyncTp(AsyncTpOperator[GemmReduceScatterProblem]):
    """See the module."""

    family = FAMILY

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, self._group_name)


VARIANT = Variant(
    family=FAMILY,
    name=AsyncTp.variant,
    arrangement=Arrangement.OTHERS,
    agent=Agent.OTHERS,
    sync=Sync.OTHERS,
    summary="torch's fused_matmul_reduce_scatter over symmetric memory",
    build=AsyncTp,
    unsupported_reason=AsyncTp.unsupported_reason,
    is_baseline=True,
)
