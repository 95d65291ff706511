"""GEMM + all-reduce, one after the other: a GEMM, then all SMs add the peers' partials and share the sums.

Two-shot: as GEMM + reduce-scatter, `bulk_synchronous`, and every sum is stored to all ranks.
"""

from __future__ import annotations

from ...gemm_reduce_scatter.host import EVERYWHERE
from ...gemm_reduce_scatter.portable.bulk_synchronous import WITH_LIBRARY, implementation
from .. import prediction
from ..problem import FAMILY

VARIANT = implementation(
    FAMILY,
    EVERYWHERE,
    prediction.bulk_synchronous,
    "a GEMM kernel, then all SMs pull and add a shard's partials and store the sums to every rank",
)
LIBRARY_VARIANT = implementation(
    FAMILY,
    EVERYWHERE,
    prediction.bulk_synchronous_library,
    "torch.mm, then all SMs pull and add a shard's partials and store the sums to every rank",
    **WITH_LIBRARY,
)
