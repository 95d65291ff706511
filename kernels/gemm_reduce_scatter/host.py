"""What the variants of GEMM + reduce-scatter share on the host, and those of GEMM + all-reduce that begin with one.

Where rows of n elements are not on 16 bytes, partials and output have longer ones (`Call.width`), C is a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..common.call import Call
from ..common.device.arguments import Block
from ..common.portable.partials import Staging
from ..common.workspace import Buffer, flags_by_source
from .problem import GemmReduceScatterProblem

FAMILY = "gemm_reduce_scatter"
ReduceCall = Call[GemmReduceScatterProblem]


@dataclass(frozen=True)
class Destination:
    """Where the sums of a shard go.

    Args:
        sends_to_all: to every rank, whose C is whole and on the heap, with the same bits; *ready* covers C, too, and a
            call ends when all peers' sums have arrived. Else this rank keeps them.
    """

    sends_to_all: bool

    def ranks(self, call: ReduceCall) -> int:
        """Return how many ranks a sum is stored to."""
        return call.world_size if self.sends_to_all else 1

    def workspace(self, call: ReduceCall) -> dict[str, Buffer]:
        """Return the buffer of C."""
        problem, width = call.problem, call.width(call.problem.n)
        if self.sends_to_all:
            return {"output": Buffer((problem.m, width), problem.out_dtype, is_symmetric=True)}
        # A rank without rows still takes part: it computes nothing of its own, into room for one row.
        rows = max(1, problem.shard_shape(call.rank)[0])
        return {"output": Buffer((rows, width), problem.out_dtype)}

    def outputs(self, call: ReduceCall) -> tuple[torch.Tensor]:
        """Return C, or this rank's rows of it."""
        problem = call.problem
        rows = problem.m if self.sends_to_all else problem.shard_shape(call.rank)[0]
        return (call.memory["output"][:rows, : problem.n],)

    def block(self, call: ReduceCall) -> Block:
        """Return where in it this rank stores its sums."""
        room = call.memory["output"]
        start, stop = call.problem.rows(call.rank)
        width = room.shape[1]
        # A rank without rows stores nothing.
        corner = room[start:] if self.sends_to_all and stop > start else room
        return Block(corner, stop - start, width, width, call.epilogue(start if self.sends_to_all else 0))


KEPT = Destination(sends_to_all=False)
EVERYWHERE = Destination(sends_to_all=True)


def shard_tiles(call: ReduceCall) -> int:
    """Return the tiles of the largest shard."""
    return call.num_tiles(*call.problem.shard_shape(0))


def num_sent(call: ReduceCall) -> int:
    """Return the tiles of all shards but this rank's."""
    return shard_tiles(call) * (call.world_size - 1)


def workspace(call: ReduceCall, *, keeps_partials: bool = True) -> dict[str, Buffer]:
    """Return the buffers of partials, those that arrive and with `keeps_partials` those that leave, and of flags."""
    problem = call.problem
    shape = (problem.world_size, problem.shard_shape(0)[0], call.width(problem.n))
    return {
        "staging": Buffer(shape, problem.dtype_of_partials, is_symmetric=True),
        "flags": flags_by_source(call.world_size, shard_tiles(call), "tile", "partial sum"),
        **({"partials": Buffer(shape, problem.dtype_of_partials)} if keeps_partials else {}),
    }


def staging_of(call: ReduceCall, partials: str = "partials") -> Staging:
    """Return where partial tiles arrive; `partials` names the buffer where this rank's own are, if there is one."""
    memory, staging = call.memory, call.memory["staging"]
    own = memory.get(partials, staging)
    _, shard_rows, width = staging.shape
    return Staging(staging, memory["flags"], own, shard_rows, call.problem.m, width)


def where(call: ReduceCall, partials: str = "partials") -> dict[str, Any]:
    """Return what every kernel takes."""
    return {"staging": staging_of(call, partials), "peers": call.peers()}


def multiply_arguments(
    call: ReduceCall, a: torch.Tensor, b: torch.Tensor, partials: str = "partials"
) -> dict[str, Any]:
    """Return what a kernel that multiplies takes."""
    return {**call.main_loop(a, b), **where(call, partials)}


def push_arguments(call: ReduceCall, partials: str = "partials") -> dict[str, Any]:
    """Return what a kernel that only pushes takes."""
    return {"TILE": call.tile(), "ROWS": call.config.comm_rows, **where(call, partials)}
