"""The `quack` baseline: the all-gather + GEMM of Dao-AILab/quack, where that package is installed.

An adapter, with nothing of QuACK in it. Each rank's copy engines push its shard to its peers, beside a persistent GEMM
kernel whose loads await a flag per shard. The tiles are those of QuACK's own benchmark of it. A is copied into the
symmetric buffer in every call, and that is part of the time.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from iris_core import Context
from iris_kernels import all_gather_gemm
from iris_kernels.all_gather_gemm.problem import AllGatherGemmProblem
from iris_kernels.common.call import Call
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.variants.library import library_variant
from overlap_taxonomy import Agent, Arrangement, Sync

from .project import Project

PROJECT = Project("quack", "distributed", "pip install quack-kernels[cu13]")

_TILE_M, _TILE_N = 128, 256
_CLUSTER_M = 2  # programs that share B; of fewer rows one


@dataclass(frozen=True)
class Quack:
    """What calls need.

    Args:
        gemm: QuACK's GEMM.
        runner: that gathers A for it.
        cluster_m: programs along M that share what they load of B.
    """

    gemm: Any
    runner: Any
    cluster_m: int


def unsupported_reason(problem: AllGatherGemmProblem, config: GemmConfig | None) -> str | None:
    """Return why QuACK cannot do a problem here, or None."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"quack takes torch.bfloat16 and torch.float16 here, not {problem.dtype}"
    return PROJECT.missing_reason((9, 0)) or PROJECT.gather_size_reason(problem, _TILE_M)


def open_runner(ctx: Context, problem: AllGatherGemmProblem) -> Quack:
    """Make the symmetric buffers, streams and events that all calls use; collective."""
    rows, columns = problem.a_shape(ctx.get_rank())
    gathered = importlib.import_module("quack.distributed")
    runner = gathered.AllGatherRunner(rows, columns, problem.dtype, ctx.process_group(), ctx.get_device())
    cluster_m = 1 if rows % (_CLUSTER_M * _TILE_M) else _CLUSTER_M
    return Quack(importlib.import_module("quack.gemm").gemm, runner, cluster_m)


def gather(call: Call[AllGatherGemmProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather and multiply; the output is new memory."""
    quack = call.channel.opened
    output = torch.empty(call.problem.m, b.shape[1], dtype=a.dtype, device=a.device)
    with quack.runner.gather(a.contiguous()) as (whole, flags):
        quack.gemm(whole, b.t(), output, None, None, _TILE_M, _TILE_N, quack.cluster_m, 1, ag_args=flags)
    return (output, whole) if call.options["keep_gathered"] else (output,)


VARIANTS = (
    library_variant(
        all_gather_gemm.FAMILY,
        PROJECT.name,
        gather,
        supports=unsupported_reason,
        open=open_runner,
        describe=lambda opened: f"quack {metadata.version('quack-kernels')}",
        options={"keep_gathered": False},
        has_epilogue=False,
        takes_fp8=False,
        place=(Arrangement.OTHERS, Agent.OTHERS, Sync.OTHERS),
        spans_hosts=False,
        summary="Dao-AILab/quack's AllGatherRunner and GEMM, where it is installed",
    ),
)
