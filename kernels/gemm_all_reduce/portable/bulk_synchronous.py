"""GEMM + all-reduce, one after the other: a GEMM, then all SMs add the peers' partials and share the sums.

Two-shot: as GEMM + reduce-scatter, `bulk_synchronous`, and every sum is stored to all ranks.
"""

from __future__ import annotations

from ...common.variants.library import with_library
from ...gemm_reduce_scatter.host import EVERYWHERE
from ...gemm_reduce_scatter.portable.bulk_synchronous import implementation, launching, multiply_with_torch
from .. import prediction
from ..problem import FAMILY

VARIANT = implementation(
    FAMILY,
    EVERYWHERE,
    prediction.bulk_synchronous,
    "a GEMM kernel, then all SMs pull and add a shard's partials and store the sums to every rank",
)
LIBRARY_VARIANT = with_library(
    VARIANT,
    launching(EVERYWHERE, multiply_with_torch),
    predict=prediction.bulk_synchronous_library,
    summary="torch.mm, then all SMs pull and add a shard's partials and store the sums to every rank",
)
