"""GEMM + reduce-scatter by torch's fused operator (``torch.ops.symm_mem.fused_matmul_reduce_scatter``)."""

from __future__ import annotations

import torch

from ..common.async_tp import AsyncTpOperator
from .operator import FAMILY
from .problem import GemmReduceScatterProblem


class AsyncTp(AsyncTpOperator[GemmReduceScatterProblem]):
    """See the module."""

    family = FAMILY

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, self._group_name)


VARIANT = AsyncTp.as_variant("torch's fused_matmul_reduce_scatter over symmetric memory")
