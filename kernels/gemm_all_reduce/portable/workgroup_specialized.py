"""GEMM + all-reduce in one kernel with two roles: most programs compute and sum, the others push partial tiles.

Two-shot, for large M: as GEMM + reduce-scatter, `workgroup_specialized`, and every sum is stored to all ranks.
"""

from __future__ import annotations

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.variants.entry import variant_of
from ...gemm_reduce_scatter.host import EVERYWHERE
from ...gemm_reduce_scatter.portable.workgroup_specialized import implementation
from .. import prediction
from ..problem import FAMILY

VARIANT = variant_of(
    implementation(FAMILY, EVERYWHERE, prediction.comm_programs),
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_PROGRAMS,
    sync=Sync.TILE_FLAG,
    summary="one kernel; some programs push partial tiles, the others compute, sum and store to every rank",
)
