"""GEMM + all-reduce in one kernel with two roles: most programs compute and sum, the others push partial tiles.

Two-shot, for large M: as GEMM + reduce-scatter, `workgroup_specialized`, and every sum is stored to all ranks.
"""

from __future__ import annotations

from ...gemm_reduce_scatter.host import EVERYWHERE
from ...gemm_reduce_scatter.portable.workgroup_specialized import implementation
from .. import prediction
from ..problem import FAMILY

VARIANT = implementation(
    FAMILY,
    EVERYWHERE,
    prediction.comm_programs,
    "one kernel; some programs push partial tiles, the others compute, sum and store to every rank",
)
