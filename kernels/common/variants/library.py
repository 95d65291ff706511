"""What the baselines share: NCCL (RCCL) and cuBLAS (hipBLASLt), which take no configuration of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from iris_core import Context
from iris_core.utils.settings import ranks_per_gpu
from overlap_taxonomy import Agent, Arrangement, Machine, Mainloop, Schedule, Sync, Variant, Work

from ..call import Call
from ..config import GemmConfig, is_fp8
from ..fp8.scaled_mm import scaled_mm_reason
from ..problem import Problem
from ..workspace import Buffer
from .entry import variant_of
from .implementation import Implementation, Outputs, valid_config

# torch 2.13 renamed the single-tensor collectives and warns about the old names; 2.11 has only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def product_reason(problem: Problem, config: GemmConfig | None) -> str | None:
    """Return why torch cannot make a rank's product for kernels of ours to send, or None.

    Products of another dtype than the operands' would be one more pass over them.
    """
    dtype = problem.dtype_of_partials
    if not is_fp8(problem.dtype) and dtype != problem.dtype:
        return f"its torch.mm gives a product the dtype of the operands, {problem.dtype}; here it is to have {dtype}"
    return valid_config(problem, config) or _scaled_mm_reason(problem)


def plain_product_reason(problem: Problem, config: GemmConfig | None) -> str | None:
    """Return likewise of a product that is C itself: torch has no epilogue, but in passes of their own."""
    if problem.epilogue:
        return f"torch.mm has no epilogue; the problem's is {', '.join(problem.epilogue)}"
    return product_reason(problem, config)


def with_library(
    portable: Implementation,
    launch: Callable[[Call[Any], torch.Tensor, torch.Tensor], None],
    *,
    predict: Callable[[Machine, Work], float],
    summary: str,
    supports: Callable[[Any, GemmConfig | None], str | None] = product_reason,
) -> Implementation:
    """Return the same pattern with the library's GEMM; all but `portable` as an `Implementation`'s."""
    how: Any = {"launch": launch, "predict": predict, "summary": summary, "supports": supports}
    return replace(portable, mainloop=Mainloop.LIBRARY, schedule=Schedule.OWN, **how)


def _scaled_mm_reason(problem: Problem) -> str | None:
    """Return why torch cannot multiply a problem's fp8 operands here, or None."""
    return scaled_mm_reason(problem) if is_fp8(problem.dtype) and torch.cuda.is_available() else None


def library_variant(
    family: str,
    name: str,
    launch: Callable[[Call[Any], torch.Tensor, torch.Tensor], Outputs | None],
    *,
    summary: str,
    workspace: Callable[[Call[Any]], dict[str, Buffer]] = lambda call: {},
    supports: Callable[[Any, GemmConfig | None], str | None] | None = None,
    open: Callable[[Context, Any], Any] = lambda ctx, problem: ctx.process_group(),
    has_epilogue: bool = True,
    takes_fp8: bool = True,
    spans_hosts: bool = True,
    place: tuple[Arrangement, Agent, Sync] = (Arrangement.LIBRARY, Agent.LIBRARY, Sync.STREAM_ORDER),
    **more: Any,
) -> Variant:
    """Return the registry's entry of a baseline.

    Args:
        family, launch, workspace: as an `Implementation`'s.
        name: what it is called.
        summary: one line for tables.
        supports: returns why it cannot do a problem, beside what holds for all baselines.
        open: makes what all calls need; unless given, the process group.
        has_epilogue: whether `launch` does what a problem's epilogue says, unless rows are normed, and gives C any
            dtype.
        takes_fp8: whether it multiplies fp8 operands with scales.
        spans_hosts: whether its ranks may live on several hosts.
        place: in the taxonomy.
        more: what else an `Implementation` takes.
    """

    def reason(problem: Problem, config: GemmConfig | None) -> str | None:
        if problem.epilogue and not has_epilogue:
            return f"it has no epilogue; the problem's is {', '.join(problem.epilogue)}"
        if problem.norm and not has_epilogue:
            return "it has no epilogue, and norms no rows; the problem's norm is an RMSNorm"
        if is_fp8(problem.dtype):
            if not takes_fp8:
                return f"it multiplies no fp8; the operands are {problem.dtype}"
            if reason := _scaled_mm_reason(problem):
                return reason
        elif problem.out_dtype != problem.dtype and not has_epilogue:
            return f"its C is of its operands' dtype, {problem.dtype}; the problem's is {problem.out_dtype}"
        if supports and (reason := supports(problem, config)):
            return reason
        if ranks_per_gpu() > 1 and torch.cuda.is_available():
            return "NCCL's collectives take one rank a GPU, and IRIS_RANKS_PER_GPU allows more"
        return "it runs kernels that are not ours and takes no configuration" if config else None

    return variant_of(
        Implementation(
            family,
            name,
            lambda problem, device: None,
            workspace,
            launch,
            supports=reason,
            open=open,
            is_ours=False,
            spans_hosts=spans_hosts,
            mainloop=Mainloop.OWN,
            schedule=Schedule.OWN,
            place=place,
            summary=summary,
            **more,
        )
    )
