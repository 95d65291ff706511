"""What the fused variants of GEMM + all-scatter share on the host."""

from __future__ import annotations

from typing import Any

import torch

from ..common.arguments import Block
from ..common.config import GemmConfig, default_config
from ..common.operator import FusedOperator
from .problem import GemmAllScatterProblem

FAMILY = "gemm_all_scatter"


class GemmAllScatter(FusedOperator[GemmAllScatterProblem]):
    """An operator whose output is the whole C (m, n) on every rank's heap."""

    family = FAMILY
    comm_share = 0.0  # the part of the SMs that only communicates

    def default_config(self) -> GemmConfig:
        return default_config(
            self.ctx.get_arch(),
            self.ctx.get_cu_count(),
            m=self.problem.m,
            n=self.problem.b_shape(0)[1],  # the largest block's, so that all ranks choose alike
            dtype=self.problem.dtype,
            comm_share=self.comm_share,
        )

    def _open_buffers(self) -> None:
        m, n = self.problem.m, self.problem.n
        self.output = self._on_heap((m, n), self.problem.dtype)
        start, stop = self.problem.columns(self.rank)
        # A rank without columns would have an empty tensor here, whose address torch gives as null.
        corner = self.output[:, start:stop] if stop > start else self.output
        self._block = Block(corner, m, stop - start, n)  # what this rank computes
        self._num_tiles = -(-m // self.config.block_m) * -(-(stop - start) // self.config.block_n)

    def _compute_arguments(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
        """Return what a compute kernel takes."""
        return {**self._main_loop(a, b), **self._where()}

    def _push_arguments(self) -> dict[str, Any]:
        """Return what a kernel that only pushes takes."""
        return {"TILE": self._tile(), "ROWS": self.config.comm_rows, **self._where()}

    def _where(self) -> dict[str, Any]:
        return {"block": self._block, "peers": self._peers(), "WORLD_SIZE": self.problem.world_size}
