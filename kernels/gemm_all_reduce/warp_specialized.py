"""GEMM + all-reduce in one kernel whose warps have different roles (Gluon, for Hopper), two-shot, for large M.

As GEMM + reduce-scatter (../gemm_reduce_scatter/warp_specialized.py), and every sum is sent to all ranks, in pieces,
while the next tile is multiplied. A rank ends the call with the peers: their sums have arrived then. As C is whole on
every rank, it does not matter who sums what: rows are cut among the ranks, or columns where that makes fewer tiles.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.config import GemmConfig
from ..common.hopper.plan import BLOCK_M, Cut, possible_cuts, predicted_us, tiles_of
from ..common.operands import padded
from ..gemm_reduce_scatter import warp_specialized
from .operator import TwoShot


class WarpSpecialized(TwoShot, warp_specialized.WarpSpecialized):
    """See the module."""

    def _config_for(self, m: int, n: int) -> GemmConfig:
        num_programs, k = self.ctx.get_cu_count(), self.problem.a_shape(0)[1]
        world_size = self.problem.world_size
        # As if every tile were sent to one peer: what that chooses is 0.5 % over the best width (results/notebook.md).
        peers = min(1, world_size - 1)

        def us(cut: Cut) -> float:
            rows = BLOCK_M * world_size * min(self._tiles_of_shard(cut.block_n))
            return round(predicted_us(cut, rows, cut.block_n, k, num_programs=num_programs, peers=peers), 1)

        return self._config_of(min(possible_cuts(k, num_programs=num_programs, teams=self.teams), key=us))

    def _tiles_of_shard(self, block_n: int) -> tuple[int, int]:
        """Return how many tiles of so many columns a shard has, of rows and of columns of C."""
        return tiles_of(*self.problem.shard_shape(0), block_n), tiles_of(*self._shard_of_columns, block_n)

    @property
    def _is_cut_by_columns(self) -> bool:
        by_rows, by_columns = self._tiles_of_shard(self.config.block_n)
        return by_columns < by_rows

    @property
    def _shard_shape(self) -> tuple[int, int]:
        return self._shard_of_columns if self._is_cut_by_columns else self.problem.shard_shape(0)

    @property
    def _shard_of_columns(self) -> tuple[int, int]:
        problem = self.problem
        return problem.m, padded(-(-problem.n // problem.world_size), problem.dtype)  # so each begins on 16 bytes

    def _open_sums(self, room: torch.Tensor) -> tuple[torch.Tensor, TensorDescriptor]:
        problem, (_, m, n) = self.problem, room.shape
        width = padded(problem.n, problem.dtype)
        whole = self._on_heap((problem.m + 1, width), problem.dtype)
        first_row, first_column = (0, self.rank * n) if self._is_cut_by_columns else (self.rank * m, 0)
        mine = self.ctx.peer_view(whole)[:, first_row : min(first_row + m, problem.m), first_column : first_column + n]
        if not mine.numel():  # the sums of a rank without any, of nothing, go to the row behind C
            mine = self.ctx.peer_view(whole)[:, problem.m :]
        return whole[: problem.m, : problem.n], self._pieces_of(mine)


VARIANT = WarpSpecialized.as_variant(
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_WARPS,
    sync=Sync.SHARED_MEMORY_BARRIER,
    summary="one kernel; a warp of each program sends partials, paced, and sums to every rank (Hopper)",
)
