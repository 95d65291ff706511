"""GEMM + all-reduce by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline.

One GEMM and one `all_reduce`, nothing else.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..common.variants.library import library_variant
from ..common.workspace import Buffer
from ..gemm_reduce_scatter.host import ReduceCall
from ..gemm_reduce_scatter.library import sum_buffer
from . import prediction
from .problem import FAMILY


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the buffer of C, and that of the sum where it has another dtype."""
    problem = call.problem
    return {**sum_buffer(problem, problem.m), "output": Buffer((problem.m, problem.n), problem.out_dtype)}


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Multiply, and reduce."""
    output = call.memory["output"]
    summed = call.memory.get("sum", output)
    call.queue_product(summed, is_partial=True)
    dist.all_reduce(summed, group=call.channel.opened)
    if summed is not output:
        output.copy_(summed)
    call.finish(output)


VARIANT = library_variant(
    FAMILY,
    "library",
    launch,
    workspace=workspace,
    outputs=lambda call: (call.memory["output"],),
    predict=prediction.library,
    summary="torch.mm, then all_reduce",
)
