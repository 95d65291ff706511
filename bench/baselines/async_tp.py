"""The `async_tp` baselines: torch's own fused operators over symmetric memory (``torch.ops.symm_mem``)."""

from __future__ import annotations

from typing import Any

import torch

from iris_core import Context
from iris_kernels import all_gather_gemm, gemm_reduce_scatter
from iris_kernels.common.call import Call
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.library import library_variant
from iris_kernels.common.problem import Problem
from overlap_taxonomy import Agent, Arrangement, Sync


def unsupported_reason(problem: Problem, config: GemmConfig | None) -> str | None:
    """Return why torch's fused operators cannot do a problem here, or None."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "torch's fused operators need NVIDIA GPUs"
    if problem.m % problem.world_size:
        return f"torch's fused operators need M ({problem.m}) to be a multiple of the ranks ({problem.world_size})"
    return None


def open_group(ctx: Context, problem: Problem) -> str:
    """Return the name of the process group."""
    import torch.distributed._symmetric_memory  # noqa: F401  registers the operators

    return str(ctx.process_group().group_name)


def gather(call: Call[Any], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather and multiply; both outputs are new memory."""
    whole, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(a.contiguous(), [b], 0, call.channel.opened)
    return (output, whole) if call.options["keep_gathered"] else (output,)


def scatter(call: Call[Any], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply, reduce and scatter; the output is new memory."""
    return (torch.ops.symm_mem.fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, call.channel.opened),)


NAME = "async_tp"
PLACE = (Arrangement.OTHERS, Agent.OTHERS, Sync.OTHERS)

VARIANTS = (
    library_variant(
        all_gather_gemm.FAMILY,
        NAME,
        gather,
        supports=unsupported_reason,
        open=open_group,
        options={"keep_gathered": False},
        place=PLACE,
        spans_hosts=False,
        summary="torch's fused_all_gather_matmul over symmetric memory",
    ),
    library_variant(
        gemm_reduce_scatter.FAMILY,
        NAME,
        scatter,
        supports=unsupported_reason,
        open=open_group,
        place=PLACE,
        spans_hosts=False,
        summary="torch's fused_matmul_reduce_scatter over symmetric memory",
    ),
)
