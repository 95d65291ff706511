"""GEMM + all-reduce by kraken (``kraken.fused.gemm_one_shot_all_reduce_fused``), for comparison: one kernel, one-shot.

Its output is fp32: the copy that rounds it to the operands' dtype is part of the time.
"""

from __future__ import annotations

import torch

from ..common.kraken import KrakenOperator
from .operator import FAMILY
from .problem import GemmAllReduceProblem

_TILE = 64  # rows and columns of a tile of kraken's kernel
_FLAG_BYTES = 4


class Kraken(KrakenOperator[GemmAllReduceProblem]):
    """See the module."""

    family = FAMILY
    module = "gemm_one_shot_all_reduce_fused"
    capability = (8, 0)
    dtypes = (torch.bfloat16, torch.float16)  # fp32 is multiplied as TF32

    @classmethod
    def size_reason(cls, problem: GemmAllReduceProblem) -> str | None:
        import torch.distributed._symmetric_memory as symm_mem

        if problem.world_size & (problem.world_size - 1):
            return f"kraken's kernel needs a power of two of ranks, not {problem.world_size}"
        tiles = -(-problem.m // _TILE) * -(-problem.n // _TILE)
        room = symm_mem.get_signal_pad_size() // (_FLAG_BYTES * problem.world_size)
        if tiles > room:
            return f"torch's signal pad has flags for {room} tiles of kraken's kernel; this would take {tiles}"
        return None

    def _open(self) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        super()._open()
        partial_bytes = self.problem.m * self.problem.n * torch.float32.itemsize
        symm_mem.get_symm_mem_workspace(self._group.group_name, min_size=partial_bytes)  # that kraken uses

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._kraken.gemm_one_shot_all_reduce(a, b, group=self._group).to(self.problem.dtype)


VARIANT = Kraken.as_variant("meta-pytorch/kraken's gemm_one_shot_all_reduce_fused, where it is installed")
