"""What the baselines share: operators of vendor calls, which take no configuration of ours."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from iris_core.utils.settings import ranks_per_gpu
from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from .config import GemmConfig
from .operator import Operator
from .problem import Problem

# torch 2.13 renamed the single-tensor collectives and warns about the old names; 2.11 has only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

P = TypeVar("P", bound=Problem)


class LibraryOperator(Operator[P]):
    """An operator that runs the vendor's kernels."""

    place = (Arrangement.LIBRARY, Agent.LIBRARY, Sync.STREAM_ORDER)  # in the taxonomy

    @classmethod
    def as_variant(cls, summary: str) -> Variant:
        """Return the registry's entry for these operators: a baseline."""
        reason = cls.unsupported_reason
        return Variant(cls.family, cls.variant, *cls.place, summary, cls, reason, is_baseline=True)

    @classmethod
    def unsupported_reason(cls, problem: P, config: GemmConfig | None) -> str | None:
        if ranks_per_gpu() > 1 and torch.cuda.is_available():
            return "the vendor's collectives take one rank a GPU, and IRIS_RANKS_PER_GPU allows more"
        return "it runs kernels that are not ours and takes no configuration" if config else None

    def default_config(self) -> None:
        return None
