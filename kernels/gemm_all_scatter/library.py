"""GEMM + all-scatter by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline. One GEMM and one all-gather, nothing else.

`all_gather_into_tensor` leaves C in blocks, one per rank: `library` stops there, the fastest that the two give.
A user who needs C as one (m, n) matrix pays a copy, or gathers into strided slices:

| variant | after the GEMM | C is |
|---|---|---|
| `library` | all_gather_into_tensor | (world_size, m, columns), a block a rank |
| `library_layout` | the same, then a copy | (m, n) |
| `library_list` | all_gather into a list of column slices, the paper's baseline | (m, n) |
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..common.call import Call
from ..common.variants.library import all_gather_single, library_variant
from ..common.workspace import Buffer
from . import prediction
from .host import FAMILY
from .problem import GemmAllScatterProblem

AllScatterCall = Call[GemmAllScatterProblem]


def blocks_workspace(call: AllScatterCall) -> dict[str, Buffer]:
    """Return the buffers of this rank's block of C, and of all ranks'; each is padded to the largest."""
    problem = call.problem
    own = (problem.m, problem.b_shape(0)[1])
    return {"own": Buffer(own, problem.out_dtype), "output": Buffer((problem.world_size, *own), problem.out_dtype)}


def layout_workspace(call: AllScatterCall) -> dict[str, Buffer]:
    """Return those and the buffer of the matrix."""
    blocks = blocks_workspace(call)
    world_size, m, columns = blocks["output"].shape
    matrix = Buffer((m, world_size, columns), call.problem.out_dtype)
    return {"own": blocks["own"], "blocks": blocks["output"], "output": matrix}


def list_workspace(call: AllScatterCall) -> dict[str, Buffer]:
    """Return the buffers of this rank's block and of the matrix."""
    layout = layout_workspace(call)
    return {"own": layout["own"], "output": layout["output"]}


def multiply(call: AllScatterCall, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return this rank's block of C, padded."""
    own = call.memory["own"]
    block = own if b.shape[1] == own.shape[1] else own[:, : b.shape[1]]
    call.queue_product(block)
    return own


def launch_blocks(call: AllScatterCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Multiply, and gather the blocks."""
    own, blocks = multiply(call, a, b), call.memory["output"]
    all_gather_single(blocks.view(-1, own.shape[1]), own, group=call.channel.opened)


def launch_layout(call: AllScatterCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Multiply, gather the blocks, and copy them into one matrix."""
    own, blocks = multiply(call, a, b), call.memory["blocks"]
    all_gather_single(blocks.view(-1, own.shape[1]), own, group=call.channel.opened)
    call.memory["output"].copy_(blocks.permute(1, 0, 2))


def launch_list(call: AllScatterCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Multiply, and gather into a list of slices of columns."""
    own, matrix = multiply(call, a, b), call.memory["output"]
    dist.all_gather(list(matrix.unbind(1)), own, group=call.channel.opened)


def matrix_of(call: AllScatterCall) -> tuple[torch.Tensor]:
    """Return C of the variants that leave it as one matrix."""
    return (call.memory["output"].view(call.problem.m, -1)[:, : call.problem.n],)


def blocks_as_matrix(problem: GemmAllScatterProblem, output: torch.Tensor) -> torch.Tensor:
    """Return the blocks as one matrix."""
    return output.permute(1, 0, 2).reshape(problem.m, -1)[:, : problem.n]


VARIANTS = (
    library_variant(
        FAMILY,
        "library",
        launch_blocks,
        workspace=blocks_workspace,
        outputs=lambda call: (call.memory["output"],),
        as_matrix=blocks_as_matrix,
        predict=prediction.library,
        summary="torch.mm, then all_gather_into_tensor; C in blocks, a rank each",
    ),
    library_variant(
        FAMILY,
        "library_layout",
        launch_layout,
        workspace=layout_workspace,
        outputs=matrix_of,
        predict=prediction.library_layout,
        summary="the same, then a copy into one matrix",
    ),
    library_variant(
        FAMILY,
        "library_list",
        launch_list,
        workspace=list_workspace,
        outputs=matrix_of,
        predict=prediction.library_list,
        summary="torch.mm, then all_gather into column slices (the paper's baseline)",
    ),
)
