"""The `async_tp` baselines: torch's own fused operators over symmetric memory (``torch.ops.symm_mem``)."""

from __future__ import annotations

from typing import Any

import torch

from iris_core import Context
from iris_kernels import all_gather_gemm, gemm_reduce_scatter
from iris_kernels.common.call import Call
from iris_kernels.common.config import GemmConfig, is_fp8
from iris_kernels.common.problem import Problem
from iris_kernels.common.variants.library import library_variant
from overlap_taxonomy import Agent, Arrangement, Sync


def unsupported_reason(problem: Problem, config: GemmConfig | None) -> str | None:
    """Return why torch's fused operators cannot do a problem here, or None."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "torch's fused operators need NVIDIA GPUs"
    if problem.m % problem.world_size:
        return f"torch's fused operators need M ({problem.m}) to be a multiple of the ranks ({problem.world_size})"
    if "block" in problem.scales:
        return "torch's fused operators take scales of the tensor or of rows, none of blocks"
    if problem.is_quantised:
        return "torch's fused operators take A quantised, and quantise nothing"
    if is_fp8(problem.dtype) and not problem.scales:
        return "torch's fused operators take fp8 with scales"
    return None


def open_group(ctx: Context, problem: Problem) -> str:
    """Return the name of the process group."""
    import torch.distributed._symmetric_memory  # noqa: F401  registers the operators

    return str(ctx.process_group().group_name)


def gather(call: Call[Any], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather and multiply; both outputs are new memory."""
    if call.problem.scales:
        return gather_scaled(call, a, b)
    whole, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(a.contiguous(), [b], 0, call.channel.opened)
    return (output, whole) if call.options["keep_gathered"] else (output,)


def gather_scaled(call: Call[Any], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather fp8 with its scales and multiply: of rows, as torch takes one of the tensor for that of all shards."""
    problem, scales = call.problem, call.operands
    a_scale = scales["a_scale"].expand(len(a), 1).contiguous()
    b_scale = scales["b_scale"].expand(1, b.shape[1]).contiguous()
    fused = torch.ops.symm_mem.fused_all_gather_scaled_matmul
    more = ([None], [None], [problem.out_dtype], [problem.use_fast_accum])
    whole, (output,) = fused(a.contiguous(), [b], a_scale, [b_scale], 0, call.channel.opened, *more)
    return (output, whole) if call.options["keep_gathered"] else (output,)


def scatter(call: Call[Any], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply, reduce and scatter; the output is new memory."""
    if call.problem.scales:
        return scatter_scaled(call, a, b)
    return (torch.ops.symm_mem.fused_matmul_reduce_scatter(a.contiguous(), b, "sum", 0, call.channel.opened),)


def scatter_scaled(call: Call[Any], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply fp8 with its scales, reduce and scatter; the output is new memory."""
    problem, a_scale, b_scale = call.problem, call.operands["a_scale"], call.operands["b_scale"]
    if set(problem.scales) == {"tensor"}:
        a_scale, b_scale = a_scale.reshape(()), b_scale.reshape(())
    else:
        a_scale, b_scale = a_scale.expand(len(a), 1).contiguous(), b_scale.expand(1, b.shape[1]).contiguous()
    fused = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
    sizes, group = [problem.m, problem.n], call.channel.opened
    how = {"out_dtype": problem.out_dtype, "use_fast_accum": problem.use_fast_accum}
    return (fused(a.contiguous(), b, a_scale, b_scale, "sum", 0, 0, group, sizes, **how),)


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
        has_epilogue=False,
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
        has_epilogue=False,
        place=PLACE,
        spans_hosts=False,
        summary="torch's fused_matmul_reduce_scatter over symmetric memory",
    ),
)
