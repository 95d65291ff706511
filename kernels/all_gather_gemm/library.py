"""All-gather + GEMM by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline.

One `all_gather_into_tensor` and one GEMM, nothing else.
"""

from __future__ import annotations

import torch

from ..common.library import all_gather_single, library_variant
from ..common.workspace import Buffer
from . import host, prediction
from .host import FAMILY, OPTIONS, GatherCall


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffers of this rank's shard and of the gathered A, each padded to the most rows, and of C."""
    problem = call.problem
    rows, dtype = problem.a_shape(0)[0], problem.dtype
    return {
        "shard": Buffer((rows, problem.k), dtype),
        "gathered": Buffer((problem.world_size * rows, problem.k), dtype),
        "output": Buffer(problem.c_shape(call.rank), problem.out_dtype),
    }


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather, and multiply."""
    shard, output = call.memory["shard"], call.memory["output"]
    if len(a) < len(shard) or not a.is_contiguous():
        shard[: len(a)].copy_(a)
        a = shard
    all_gather_single(call.memory["gathered"], a, group=call.channel.opened)
    # Shards but the last ones are full, so padding comes last.
    call.multiply_with_torch(host.gathered(call), b, output)
    return outputs(call)


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
    has_epilogue=True,
    predict=prediction.library,
    summary="all_gather_into_tensor, then torch.mm",
)
