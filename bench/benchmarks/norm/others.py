"""Other projects' all-reduces with a residual and a norm, behind cuBLAS's product: kraken's, FlashInfer's.

Adapters, with nothing of theirs in them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from iris_core import Context
from iris_kernels.common.problem import Problem

from ...baselines.kraken import PROJECT as KRAKEN
from ...baselines.project import Project

FLASHINFER = Project("flashinfer", "comm", "pip install flashinfer-python")
_CAPABILITY = (9, 0)


class Fusion(NamedTuple):
    """What calls a fusion, and what ends it.

    Args:
        call: takes A and B, and returns C if the fusion does, the normed rows, and their scales if they have some.
        close: frees what it holds; collective.
    """

    call: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
    close: Callable[[], None]


class Other(NamedTuple):
    """A project's fusion.

    Args:
        project: that it is of.
        quantises: whether it can quantise normed rows to e4m3, with a scale each.
        make: makes it for a problem with a norm, of what the epilogue reads; collective.
    """

    project: Project
    quantises: bool
    make: Callable[[Context, Problem, Mapping[str, torch.Tensor]], Fusion]

    def missing_reason(self) -> str:
        """Return why it cannot be had here, or ""."""
        return self.project.missing_reason(_CAPABILITY) or ""


def kraken(ctx: Context, problem: Problem, read: Mapping[str, torch.Tensor]) -> Fusion:
    """Return kraken's, in one shot; it does not return the sum."""
    import torch.distributed._symmetric_memory as symm_mem

    module = importlib.import_module("kraken.fused.one_shot_all_reduce_bias_rms_norm")
    function, group = module.one_shot_all_reduce_bias_rms_norm, ctx.process_group()
    buffer = symm_mem.empty((problem.m, problem.n), dtype=problem.dtype, device=ctx.get_device())
    symm_mem.rendezvous(buffer, group)

    def call(a: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        partial = torch.mm(a, b)
        normed = torch.empty_like(partial)
        function(buffer, partial, read["residual"], read["norm_weight"], normed, problem.norm.eps, group=group)
        return (normed,)

    return Fusion(call, lambda: None)


def flashinfer(ctx: Context, problem: Problem, read: Mapping[str, torch.Tensor]) -> Fusion:
    """Return FlashInfer's of TensorRT-LLM, in one shot or two as it chooses, summed in fp32."""
    comm = importlib.import_module("flashinfer.comm")
    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=problem.world_size,
        rank=ctx.get_rank(),
        max_token_num=problem.m,
        hidden_dim=problem.n,
        dtype=problem.dtype,
        group=ctx.process_group(),
    )
    pattern, normed_dtype = comm.AllReduceFusionPattern.kARResidualRMSNorm, problem.norm.dtype
    if normed_dtype is not None:
        pattern = comm.AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant

    def call(a: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        partial = torch.mm(a, b)
        c, normed = torch.empty_like(partial), torch.empty_like(partial, dtype=normed_dtype)
        outputs = {"norm_out": normed}
        if normed_dtype is not None:
            scales = torch.empty(problem.m, 1, dtype=torch.float32, device=a.device)
            outputs = {"quant_out": normed, "scale_out": scales}
        comm.allreduce_fusion(
            input=partial,
            workspace=workspace,
            pattern=pattern,
            launch_with_pdl=True,
            residual_out=c,
            residual_in=read["residual"],
            rms_gamma=read["norm_weight"],
            rms_eps=problem.norm.eps,
            fp32_acc=True,
            **outputs,
        )
        return (c, *outputs.values())

    return Fusion(call, workspace.destroy)


OTHERS = {"kraken": Other(KRAKEN, False, kraken), "flashinfer": Other(FLASHINFER, True, flashinfer)}
