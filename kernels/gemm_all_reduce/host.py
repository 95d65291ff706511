"""What the one-shot variants of GEMM + all-reduce share on the host.

The two-shot ones are GEMM + reduce-scatter whose sums go to every rank, so every rank has the same bits: the ready
signal covers C too, and a call ends when all peers' sums have arrived (../gemm_reduce_scatter/host.py, `EVERYWHERE`).
"""

from __future__ import annotations

import torch

from ..common.device.arguments import Block
from ..common.launch.launch_metadata import Arguments, launch_metadata, peers_of
from ..common.workspace import Buffer
from ..gemm_reduce_scatter.host import ReduceCall

FAMILY = "gemm_all_reduce"


def _moved(args: Arguments) -> int:
    """Return how many elements are stored as partials to peers, and read as all ranks' partials."""
    return args["out"].m * args["out"].n * (2 * peers_of(args) + 1)


ONE_SHOT = launch_metadata(product=lambda args: (args["out"].m, args["out"].n, args["gemm"].k), moved=_moved)


def workspace(call: ReduceCall, *, halves: int = 1) -> dict[str, Buffer]:
    """Return the buffers of C and of all ranks' partials, these in so many halves."""
    problem, width = call.problem, call.width(call.problem.n)
    partials = Buffer((call.world_size, problem.m, width), problem.dtype_of_partials, is_symmetric=True, halves=halves)
    return {"output": Buffer((problem.m, width), problem.out_dtype), "staging": partials}


def outputs(call: ReduceCall) -> tuple[torch.Tensor]:
    """Return C."""
    return (call.memory["output"][:, : call.problem.n],)


def block_of(call: ReduceCall) -> Block:
    """Return where C is stored."""
    room = call.memory["output"]
    m, width = room.shape
    return Block(room, m, width, width, call.epilogue())
