"""GEMM + all-reduce in one kernel whose warps have different roles (Gluon, for Hopper), two-shot, for large M.

As GEMM + reduce-scatter (../gemm_reduce_scatter/warp_specialized.py), and every sum is sent to all ranks, in pieces,
while the next tile is multiplied. A rank ends the call with the peers: their sums have arrived then.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from ..gemm_reduce_scatter import warp_specialized
from .operator import FAMILY, TwoShot


class WarpSpecialized(TwoShot, warp_specialized.WarpSpecialized):
    """See the module."""

    def _open_sums(self, room: torch.Tensor) -> tuple[torch.Tensor, TensorDescriptor]:
        m, n = self.problem.m, self.problem.n
        shards = self._on_heap(room.shape, room.dtype)  # all as high as the largest; what is past the last row is no C
        return shards.flatten(0, 1)[:m, :n], self._pieces_of(self.ctx.peer_view(shards)[:, self.rank, :, :n])


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
