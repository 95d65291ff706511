"""What the fused variants of GEMM + all-scatter share on the host."""

from __future__ import annotations

from typing import Any

import torch

from ..common.arguments import Block
from ..common.config import GemmConfig
from ..common.fused_operator import FusedOperator
from .problem import GemmAllScatterProblem

FAMILY = "gemm_all_scatter"


class GemmAllScatter(FusedOperator[GemmAllScatterProblem]):
    """An operator whose output is the whole C (m, n) on every rank's heap."""

    family = FAMILY

    def default_config(self) -> GemmConfig:
        return self._config_for(self.problem.m, self.problem.b_shape(0)[1])  # the largest block of columns

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
