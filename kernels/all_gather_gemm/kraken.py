"""All-gather + GEMM by kraken (``kraken.fused.all_gather_matmul``), for comparison: copy engines beside a GEMM kernel.

Copied in every call, and part of its time: A, into the symmetric buffer that peers read; B, unless it is the transpose
of a contiguous matrix.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from iris_core import Context

from ..common.kraken import KrakenOperator, rows_on_16_bytes
from ..common.operands import fill_rows
from .operator import FAMILY, Gathers
from .problem import AllGatherGemmProblem

_BLOCK_M, _GROUP_M = 128, 4  # of kraken's kernel; a shard of fewer rows than both give is taken without groups


class Kraken(Gathers, KrakenOperator[AllGatherGemmProblem]):
    """See the module. `gathered` is the whole A after every call."""

    family = FAMILY
    module = "all_gather_matmul"
    capability = (9, 0)

    def __init__(
        self, ctx: Context, problem: AllGatherGemmProblem, config: None = None, *, keep_gathered: bool = False
    ) -> None:
        super().__init__(ctx, problem, config)

    @classmethod
    def size_reason(cls, problem: AllGatherGemmProblem) -> str | None:
        rows, left_over = divmod(problem.m, problem.world_size)
        step = _BLOCK_M * _GROUP_M if rows >= _BLOCK_M * _GROUP_M else _BLOCK_M
        if left_over or rows % step:
            return f"kraken's kernel needs {step} rows of A or a multiple on each rank; M is {problem.m}"
        columns, left_over = divmod(problem.n, problem.world_size)
        for name, size in (("K", problem.k), ("N on each rank", columns)):
            if left_over or not fill_rows(size, problem.dtype):
                return f"kraken's kernel reads and writes rows on 16 bytes; {name} is not so long"
        return None

    def _open(self) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        super()._open()
        if self._group is not dist.group.WORLD:
            raise ValueError(f"{self}: kraken's function runs on torch.distributed's default group alone")
        problem, device = self.problem, self.ctx.get_device()
        self._shard = symm_mem.empty(problem.a_shape(self.rank), dtype=problem.dtype, device=device)
        symm_mem.rendezvous(self._shard, self._group)
        self._progress = torch.zeros(problem.world_size, dtype=torch.uint32, device=device)
        self.gathered = torch.empty(problem.m, problem.k, dtype=problem.dtype, device=device)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._shard.copy_(a)
        b = rows_on_16_bytes(b.t()).t()
        _, output = self._kraken.all_gather_matmul(self._shard, b, a_out=self.gathered, progress=self._progress)
        self._forget_descriptors()
        return output


VARIANT = Kraken.as_variant("meta-pytorch/kraken's all_gather_matmul, where it is installed")
