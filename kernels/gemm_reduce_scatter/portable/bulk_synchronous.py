"""GEMM + reduce-scatter, one after the other: a GEMM, then all SMs pull the peers' partials and add them.

The GEMM is a kernel of ours, or the library's. One stream. The second kernel signals to the peers that this rank's
product is complete ("ready"), waits for theirs, pulls and adds; the call ends when all peers have read what they need
here ("done"), so the next GEMM may overwrite it. Pattern: arXiv 2511.12500, section 4 ("bulk synchronous").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from iris_core import translate
from overlap_taxonomy import Agent, Arrangement, Machine, Sync, Work

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_call, wait_ready
from ...common.device.tile_scheduler import num_tiles, peers_first, tile_origin
from ...common.device.trace import PUSH, PUSH_WAIT, trace_span, trace_time
from ...common.portable.gemm import store_subtile, subtile_offsets
from ...common.portable.partials import COMPUTES_ALL, PULLS, own_partials, partial_ptr, shards_of
from ...common.portable.tile_loop import compute_tiles, keep_tile
from ...common.variants.implementation import Implementation, default_plan
from ...common.variants.library import with_library
from ...common.workspace import Buffer
from .. import host, prediction
from ..host import FAMILY, KEPT, Destination, ReduceCall
from ..problem import GemmReduceScatterProblem

Launch = Callable[[ReduceCall, torch.Tensor, torch.Tensor], None]


@triton.jit(launch_metadata=COMPUTES_ALL)
def gemm_reduce_scatter_bulk_synchronous(a, b, gemm, staging, peers, TILE: tl.constexpr):
    """Compute this rank's partial tiles of all shards."""
    shards = shards_of(staging)
    indices = (tl.program_id(0), tl.num_programs(0), num_tiles(shards, TILE) * TILE.WORLD_SIZE)
    partials = own_partials(staging)
    compute_tiles(indices, a, b, gemm, shards, partials, peers, None, peers_first, keep_tile, TILE)


@triton.jit(launch_metadata=PULLS)
def gemm_reduce_scatter_bulk_synchronous_pull(
    out, staging, peers, ROWS: tl.constexpr, DESTINATIONS: tl.constexpr, TILE: tl.constexpr
):
    """Add all ranks' partials of this rank's shard; the sum goes to DESTINATIONS ranks."""
    WORLD_SIZE: tl.constexpr = TILE.WORLD_SIZE
    epoch = begin_call(peers, WORLD_SIZE)
    began = trace_time(peers)
    wait_ready(peers, epoch, WORLD_SIZE)
    began = trace_span(peers, PUSH_WAIT, 0, began)
    chunks: tl.constexpr = TILE.BLOCK_M // ROWS
    shards = shards_of(staging)
    mine_ptr = partial_ptr(staging.partial_ptr, staging, peers.rank)
    for chunk in range(tl.program_id(0), num_tiles(shards, TILE) * chunks, tl.num_programs(0)):
        row, col = tile_origin(chunk // chunks, shards, TILE)
        row += (chunk % chunks) * ROWS
        offsets, mask = subtile_offsets(out, row, col, ROWS, TILE.BLOCK_N)
        total = tl.load(mine_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        for distance in tl.static_range(1, WORLD_SIZE):
            peer_ptr = translate(mine_ptr, peers.rank, (peers.rank + distance) % WORLD_SIZE, peers.heap_bases)
            total += tl.load(peer_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        store_subtile(total, out, row, col, peers, DESTINATIONS, ROWS, TILE.BLOCK_N, TILE)
        began = trace_span(peers, PUSH, chunk, began)
    finish_call(peers, epoch, tl.num_programs(0), WORLD_SIZE)


def plan(problem: GemmReduceScatterProblem, device: Device) -> GemmConfig:
    """Return the family's plan with small chunks: all ranks' partials of one are in registers at once."""
    return replace(default_plan(problem, device), comm_rows=16)


def multiply_tiles(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel that makes this rank's partial C, where the peers pull it from."""
    arguments = host.multiply_arguments(call, a, b, "staging")
    call.run(gemm_reduce_scatter_bulk_synchronous, call.config.num_sms, **arguments)


def multiply_with_torch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the library's GEMM that makes it."""
    staging = call.memory["staging"]
    partial = staging.view(-1, staging.shape[2])[: call.problem.m, : call.problem.n]  # shards but the last are full
    call.queue_product(partial, is_partial=True)


def launching(destination: Destination, multiply: Launch) -> Launch:
    """Return what queues a call, of a GEMM that `multiply` queues, and of sums with this destination."""

    def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
        multiply(call, a, b)
        call.run(
            gemm_reduce_scatter_bulk_synchronous_pull,
            call.config.num_sms,
            **host.push_arguments(call, "staging"),
            out=destination.block(call),
            DESTINATIONS=destination.ranks(call),
        )

    return launch


def implementation(
    family: str, destination: Destination, predict: Callable[[Machine, Work], float], summary: str
) -> Implementation:
    """Return the pattern for a family, with the destination of its sums, its prediction, and a line for tables."""

    def workspace(call: ReduceCall) -> dict[str, Buffer]:
        return {**destination.workspace(call), **host.workspace(call, keeps_partials=False)}

    return Implementation(
        family,
        "bulk_synchronous",
        plan,
        workspace,
        launching(destination, multiply_tiles),
        destination.outputs,
        predict=predict,
        place=(Arrangement.SEQUENTIAL_KERNELS, Agent.ALL_SMS, Sync.STREAM_ORDER),
        summary=summary,
    )


VARIANT = implementation(
    FAMILY,
    KEPT,
    prediction.bulk_synchronous,
    "a GEMM kernel, then all SMs pull and add the peers' partials",
)
LIBRARY_VARIANT = with_library(
    VARIANT,
    launching(KEPT, multiply_with_torch),
    predict=prediction.bulk_synchronous_library,
    summary="torch.mm, then all SMs pull and add the peers' partials",
)
