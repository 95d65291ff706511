"""Problems of one family, and a GPU and a configuration to choose for."""

from __future__ import annotations

from typing import Any

import torch
from families import make_problem

from iris_kernels.common.config import GemmConfig

GPU = "NVIDIA H200"
FAMILY = "gemm_all_scatter"
CONFIG = GemmConfig(128, 128, 64, num_stages=4)


def problem(
    m: int = 8192, n: int = 8192, k: int = 8192, world_size: int = 4, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Return a problem of the family."""
    return make_problem(FAMILY, m, n, k, world_size, dtype)
