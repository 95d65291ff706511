"""All-gather + GEMM by torch's fused operator (``torch.ops.symm_mem.fused_all_gather_matmul``), for comparison."""

from __future__ import annotations

import torch

from iris_core import Context

from ..common.async_tp import AsyncTpOperator
from .operator import FAMILY, Gathers
from .problem import AllGatherGemmProblem


class AsyncTp(Gathers, AsyncTpOperator[AllGatherGemmProblem]):
    """See the module. `gathered` is the whole A after every call."""

    family = FAMILY

    def __init__(
        self, ctx: Context, problem: AllGatherGemmProblem, config: None = None, *, keep_gathered: bool = False
    ) -> None:
        super().__init__(ctx, problem, config)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.gathered, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(a.contiguous(), [b], 0, self._group_name)
        return output


VARIANT = AsyncTp.as_variant("torch's fused_all_gather_matmul over symmetric memory")
