"""GEMM + all-scatter, one after the other: a GEMM, then a kernel in which all SMs push the result to the peers.

The GEMM is a kernel of ours, or the library's. Both are on one stream, whose order is the only synchronisation inside a
rank. The push kernel waits until the peers are ready, and its last program ends the call. Pattern: arXiv 2511.12500,
section 4 ("bulk synchronous").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Call
from ...common.device.handshake import begin_call, current_call, finish_call
from ...common.device.tile_scheduler import num_tiles, row_grouped
from ...common.portable.tile_loop import compute_tiles, keep_tile
from ...common.variants.implementation import Implementation, default_plan
from ...common.variants.library import plain_product_reason, with_library
from .. import host, prediction
from ..host import FAMILY, MULTIPLIES, PUSHES, push_tiles
from ..problem import GemmAllScatterProblem


@triton.jit(launch_metadata=MULTIPLIES)
def gemm_all_scatter_bulk_synchronous(a, b, gemm, block, peers, TILE: tl.constexpr):
    """Compute this rank's block of C."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    indices = (tl.program_id(0), tl.num_programs(0), num_tiles(block, TILE))
    compute_tiles(indices, a, b, gemm, block, block, peers, epoch, row_grouped, keep_tile, TILE)


@triton.jit(launch_metadata=PUSHES)
def gemm_all_scatter_bulk_synchronous_push(block, peers, BEGINS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Push this rank's block of C to every peer, in a call that this kernel BEGINS, or another one has begun."""
    if BEGINS:
        epoch = begin_call(peers, TILE.WORLD_SIZE)
    else:
        epoch = current_call(peers, TILE.WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    push_tiles(pid, step, epoch, block, peers, None, False, ROWS, TILE)
    finish_call(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)


def launch(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the GEMM kernel, then the one that pushes."""
    call.run(gemm_all_scatter_bulk_synchronous, call.config.num_sms, **host.compute_arguments(call, a, b))
    push(call, begins=False)


def launch_with_torch(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the library's GEMM, then the kernel that pushes."""
    columns = slice(*call.problem.columns(call.rank))
    call.queue_product(call.memory["output"][:, columns])
    push(call, begins=True)


def push(call: Call[GemmAllScatterProblem], *, begins: bool) -> None:
    """Queue the kernel that pushes."""
    arguments = {"BEGINS": begins, **host.push_arguments(call)}
    config = call.config
    call.run(gemm_all_scatter_bulk_synchronous_push, config.num_sms, num_warps=config.comm_warps, **arguments)


VARIANT = Implementation(
    FAMILY,
    "bulk_synchronous",
    default_plan,
    host.workspace,
    launch,
    host.outputs,
    predict=prediction.bulk_synchronous,
    place=(Arrangement.SEQUENTIAL_KERNELS, Agent.ALL_SMS, Sync.STREAM_ORDER),
    summary="a GEMM kernel, then all SMs push the result",
)
LIBRARY_VARIANT = with_library(
    VARIANT,
    launch_with_torch,
    predict=prediction.bulk_synchronous_library,
    summary="torch.mm, then all SMs push the result",
    supports=plain_product_reason,
)
