"""What the fused variants of GEMM + reduce-scatter share on the host."""

from __future__ import annotations

from typing import Any

import torch

from ..common.arguments import Block
from ..common.config import GemmConfig
from ..common.fused_operator import FusedOperator
from ..common.partials import Staging
from .problem import GemmReduceScatterProblem

FAMILY = "gemm_reduce_scatter"


class GemmReduceScatter(FusedOperator[GemmReduceScatterProblem]):
    """An operator whose output is this rank's rows of the sum of all ranks' products.

    Where rows of n elements are not on 16 bytes, partials and output have longer ones (`_width`), `output` is a view.
    """

    family = FAMILY
    keeps_partials = True  # whether partial tiles are stored here before they are sent
    destinations = 1  # how many ranks a sum is stored to
    workspace_buffers = 1  # that calls use alternately

    def default_config(self) -> GemmConfig:
        return self._config_for(self.problem.m, self.problem.n)

    def _open_buffers(self) -> None:
        problem, device = self.problem, self.ctx.get_device()
        shard = (self._shard_shape[0], self._width(problem.n))
        shards = (problem.world_size, *shard)
        self._workspace = self._on_heap((self.workspace_buffers * shards[0], *shard), problem.dtype)
        self._flags = self._open_flags()
        self._partials = torch.zeros(shards if self.keeps_partials else 1, dtype=problem.dtype, device=device)
        self.output, self._out = self._open_output()

    def _open_flags(self) -> torch.Tensor:
        """Return the flags that the peers set here for their partial tiles."""
        return self._flags_by_source(self._tiles(self._shard_shape), "tile", "partial sum")

    @property
    def _shard_shape(self) -> tuple[int, int]:
        """The (m, n) of the largest shard of C that a rank sums."""
        return self.problem.shard_shape(0)

    def _open_output(self) -> tuple[torch.Tensor, Block]:
        """Return the output, and where in it this rank stores its sums."""
        rows, n = self.problem.shard_shape(self.rank)
        width = self._width(n)
        # A rank without rows still takes part: it computes nothing of its own, into room for one row.
        room = torch.zeros(max(rows, 1), width, dtype=self.problem.dtype, device=self.ctx.get_device())
        return room[:rows, :n], Block(room, rows, width, width)

    def _tiles(self, shape: tuple[int, int]) -> int:
        return -(-shape[0] // self.config.block_m) * -(-shape[1] // self.config.block_n)

    @property
    def _num_sent(self) -> int:
        """Tiles of all shards but this rank's."""
        return self._flags.numel() // self.problem.world_size * (self.problem.world_size - 1)

    def _staging(self) -> Staging:
        shard_rows, width = self._workspace.shape[1:]
        return Staging(self._workspace, self._flags, self._partials, shard_rows, self.problem.m, width)

    def _multiply_arguments(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
        """Return what a kernel that multiplies takes."""
        return {**self._main_loop(a, b), **self._where()}

    def _push_arguments(self) -> dict[str, Any]:
        """Return what a kernel that only pushes takes."""
        return {"TILE": self._tile(), "ROWS": self.config.comm_rows, **self._where()}

    def _where(self) -> dict[str, Any]:
        return {"staging": self._staging(), "peers": self._peers(), "WORLD_SIZE": self.problem.world_size}
