"""GEMM + all-reduce in one kernel whose warps have different roles (Gluon, for Hopper), two-shot, for large M.

As GEMM + reduce-scatter (../gemm_reduce_scatter/warp_specialized.py), and every sum is sent to all ranks, in pieces,
while the next tile is multiplied. A rank ends the call with the peers: their sums have arrived then. As C is whole on
every rank, it does not matter who sums what: rows are cut among the ranks, or columns where that makes fewer tiles.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from ..common.operands import padded
from ..gemm_reduce_scatter import warp_specialized
from .operator import FAMILY, TwoShot


class WarpSpecialized(TwoShot, warp_specialized.WarpSpecialized):
    """See the module."""

    cuts_shards = False

    def _peers_of_a_tile(self) -> int:
        return min(1, self.problem.world_size - 1)  # of a sum all of them, of a partial one

    @property
    def _is_cut_by_columns(self) -> bool:
        return self._tiles(self._shard_of_columns) < self._tiles(self.problem.shard_shape(0))

    @property
    def _shard_shape(self) -> tuple[int, int]:
        return self._shard_of_columns if self._is_cut_by_columns else self.problem.shard_shape(0)

    @property
    def _shard_of_columns(self) -> tuple[int, int]:
        problem = self.problem
        return problem.m, padded(-(-problem.n // problem.world_size), problem.dtype)  # TMA stores on 16 bytes

    def _open_sums(self, room: torch.Tensor) -> tuple[torch.Tensor, TensorDescriptor]:
        problem, by_columns = self.problem, self._is_cut_by_columns
        shards, m, n = room.shape  # all as large as the largest; what is past the last row or column is no part of C
        whole = self._on_heap((m, shards * n) if by_columns else (shards * m, n), problem.dtype)
        at_all = self.ctx.peer_view(whole)
        mine = at_all[:, :, self.rank * n :][..., :n] if by_columns else at_all[:, self.rank * m :][:, :m]
        return whole[: problem.m, : problem.n], self._pieces_of(mine)


VARIANT = Variant(
    family=FAMILY,
    name=WarpSpecialized.variant,
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_WARPS,
    sync=Sync.SHARED_MEMORY_BARRIER,
    summary="one kernel; a warp of each program sends partials, paced, and sums to every rank (Hopper)",
    build=WarpSpecialized,
    unsupported_reason=WarpSpecialized.unsupported_reason,
)
