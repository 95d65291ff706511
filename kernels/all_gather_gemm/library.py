"""All-gather + GEMM by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline.

One `all_gather_into_tensor` and one GEMM, nothing else.
"""

from __future__ import annotations

import torch

from ..common.config import is_fp8
from ..common.variants.library import all_gather_single, library_variant
from ..common.workspace import Buffer
from . import host, prediction
from .host import FAMILY, OPTIONS, GatherCall
from .problem import AllGatherGemmProblem


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffers of this rank's shard and of the gathered A, each padded to the most rows, and of C."""
    problem = call.problem
    rows, dtype = problem.a_shape(0)[0], problem.dtype
    return {
        "shard": Buffer((rows, problem.k), dtype),
        "gathered": Buffer((problem.world_size * rows, problem.k), dtype),
        **_scale_buffers(problem, rows),
        "output": Buffer(problem.c_shape(call.rank), problem.out_dtype),
    }


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Gather, and multiply; what is quantised is by the kernel of the other variants."""
    shard, output = call.memory["shard"], call.memory["output"]
    a = host.quantised(call, a, shard, call.memory.get("shard_scale"), slice(len(a)))
    if len(a) < len(shard) or not a.is_contiguous():
        shard[: len(a)].copy_(a)
        a = shard
    gathered, group = call.memory["gathered"], call.channel.opened
    if is_fp8(a.dtype):  # not of all backends
        gathered, a = gathered.view(torch.uint8), a.view(torch.uint8)
    all_gather_single(gathered, a, group=group)
    if call.problem.scales:
        own, scale = call.memory["shard_scale"], call.operands["a_scale"]
        own[: scale.shape[0] if call.problem.scales[0] != "tensor" else None].copy_(scale)  # onto itself, if quantised
        all_gather_single(call.memory["gathered_scale"], own, group=group)
    # Shards but the last ones are full, so padding comes last.
    call.queue_product(output, a=host.gathered(call), a_scale=host.gathered_scale(call))


def _scale_buffers(problem: AllGatherGemmProblem, rows: int) -> dict[str, Buffer]:
    """Return the buffers of the scales of this rank's shard and of the gathered A, padded likewise."""
    if not problem.scales:
        return {}
    shape = (rows, problem.scale_columns)
    return {
        "shard_scale": Buffer(shape, torch.float32),
        "gathered_scale": Buffer((problem.world_size * shape[0], shape[1]), torch.float32),
    }


def outputs(call: GatherCall) -> tuple[torch.Tensor, ...]:
    """Return C, and A if it is kept."""
    return host.with_gathered(call, call.memory["output"])


VARIANT = library_variant(
    FAMILY,
    "library",
    launch,
    workspace=workspace,
    outputs=outputs,
    options=OPTIONS,
    gathered=host.gathered,
    predict=prediction.library,
    summary="all_gather_into_tensor, then torch.mm",
)
