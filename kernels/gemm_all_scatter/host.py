"""What the variants of GEMM + all-scatter share on the host: the output is the whole C on every rank's heap."""

from __future__ import annotations

from typing import Any

import torch

from ..common.call import Call
from ..common.device.arguments import Block
from ..common.workspace import Buffer
from .problem import GemmAllScatterProblem

FAMILY = "gemm_all_scatter"


def workspace(call: Call[GemmAllScatterProblem]) -> dict[str, Buffer]:
    """Return the buffer of C."""
    problem = call.problem
    return {"output": Buffer((problem.m, problem.n), problem.out_dtype, is_symmetric=True)}


def outputs(call: Call[GemmAllScatterProblem]) -> tuple[torch.Tensor]:
    """Return C."""
    return (call.memory["output"],)


def num_tiles(call: Call[GemmAllScatterProblem]) -> int:
    """Return the number of tiles of this rank's block of columns."""
    return call.num_tiles(call.problem.m, call.problem.b_shape(call.rank)[1])


def block_of(call: Call[GemmAllScatterProblem]) -> Block:
    """Return the columns of C that this rank computes."""
    (output,), (start, stop) = outputs(call), call.problem.columns(call.rank)
    # A rank without columns would have an empty tensor here, whose address torch gives as null.
    corner = output[:, start:stop] if stop > start else output
    return Block(corner, call.problem.m, stop - start, call.problem.n, call.epilogue())


def compute_arguments(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    """Return what a kernel that computes takes."""
    return {**call.main_loop(a, b), **_where(call)}


def push_arguments(call: Call[GemmAllScatterProblem]) -> dict[str, Any]:
    """Return what a kernel that only pushes takes."""
    return {"TILE": call.tile(), "ROWS": call.config.comm_rows, **_where(call)}


def _where(call: Call[GemmAllScatterProblem]) -> dict[str, Any]:
    return {"block": block_of(call), "peers": call.peers()}
