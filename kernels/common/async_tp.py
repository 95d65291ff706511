"""What the `async_tp` baselines share: torch's own fused operators over symmetric memory."""

from __future__ import annotations

from typing import TypeVar

import torch

from overlap_taxonomy import Agent, Arrangement, Sync

from .config import GemmConfig
from .library import LibraryOperator
from .problem import Problem

P = TypeVar("P", bound=Problem)


class AsyncTpOperator(LibraryOperator[P]):
    """An operator of ``torch.ops.symm_mem``, which allocates its output in every call and takes a contiguous A only."""

    variant = "async_tp"
    place = (Arrangement.OTHERS, Agent.OTHERS, Sync.OTHERS)
    keeps_outputs = False

    @classmethod
    def unsupported_reason(cls, problem: P, config: GemmConfig | None) -> str | None:
        if not torch.cuda.is_available() or torch.version.cuda is None:
            return "torch's fused operators need NVIDIA GPUs"
        if problem.m % problem.world_size:
            return f"torch's fused operators need M ({problem.m}) to be a multiple of the ranks ({problem.world_size})"
        return super().unsupported_reason(problem, config)

    def _open(self) -> None:
        import torch.distributed._symmetric_memory  # noqa: F401  registers the operators

        self._group_name = self.ctx.process_group().group_name
