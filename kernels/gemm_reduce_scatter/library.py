"""GEMM + reduce-scatter by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline.

One GEMM and one reduce-scatter, nothing else.
"""

from __future__ import annotations

import torch

from ..common.variants.library import library_variant, reduce_scatter_single
from ..common.workspace import Buffer
from . import prediction
from .host import FAMILY, ReduceCall
from .problem import GemmReduceScatterProblem


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the buffers of this rank's partial C, and of its rows of the sum; every rank's are padded to the most."""
    problem = call.problem
    rows = problem.shard_shape(0)[0]
    return {
        "partial": Buffer((problem.world_size * rows, problem.n), problem.dtype_of_partials),
        **sum_buffer(problem, rows),
        "output": Buffer((rows, problem.n), problem.out_dtype),
    }


def sum_buffer(problem: GemmReduceScatterProblem, rows: int) -> dict[str, Buffer]:
    """Return the buffer of so many rows of the sum, where partial sums have another dtype than C; else none."""
    dtype = problem.dtype_of_partials
    return {} if dtype == problem.out_dtype else {"sum": Buffer((rows, problem.n), dtype)}


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Multiply, and reduce and scatter."""
    partial, output = call.memory["partial"], call.memory["output"]
    call.queue_product(partial[: call.problem.m], is_partial=True)
    summed = call.memory.get("sum", output)
    reduce_scatter_single(summed, partial, group=call.channel.opened)
    if summed is not output:
        output.copy_(summed)
    call.finish(outputs(call)[0])


def outputs(call: ReduceCall) -> tuple[torch.Tensor]:
    """Return this rank's rows of C."""
    return (call.memory["output"][: call.problem.shard_shape(call.rank)[0]],)


VARIANT = library_variant(
    FAMILY,
    "library",
    launch,
    workspace=workspace,
    outputs=outputs,
    predict=prediction.library,
    summary="torch.mm, then reduce_scatter_tensor",
)
