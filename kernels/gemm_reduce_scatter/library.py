"""GEMM + reduce-scatter by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline.

One GEMM and one reduce-scatter, nothing else.
"""

from __future__ import annotations

import torch

from ..common.library import library_variant, reduce_scatter_single
from ..common.workspace import Buffer
from . import prediction
from .host import FAMILY, ReduceCall


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the buffers of this rank's partial C, and of its rows of the sum; every rank's are padded to the most."""
    problem = call.problem
    rows = problem.shard_shape(0)[0]
    return {
        "partial": Buffer((problem.world_size * rows, problem.n), problem.out_dtype),
        "output": Buffer((rows, problem.n), problem.out_dtype),
    }


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    """Multiply, and reduce and scatter."""
    partial = call.memory["partial"]
    call.multiply_with_torch(a, b, partial[: call.problem.m], is_partial=True)
    reduce_scatter_single(call.memory["output"], partial, group=call.channel.opened)
    call.finish(outputs(call)[0])
    return outputs(call)


def outputs(call: ReduceCall) -> tuple[torch.Tensor]:
    """Return this rank's rows of C."""
    return (call.memory["output"][: call.problem.shard_shape(call.rank)[0]],)


VARIANT = library_variant(
    FAMILY,
    "library",
    launch,
    workspace=workspace,
    outputs=outputs,
    has_epilogue=True,
    predict=prediction.library,
    summary="torch.mm, then reduce_scatter_tensor",
)
