"""GEMM + reduce-scatter in one kernel: a program stores its partial tile at the tile's owner, in its epilogue.

The peers' shards first, each tile signalled to its owner; then the own shard, whose epilogue waits for the peers'
partials, adds them and stores the sum. After its first tile a program waits once for the peers' staging buffers to be
ready. A tile is signalled when the next one is computed: its stores have arrived by then, and the release need not wait
for them. Pattern: arXiv 2511.12500, section 4 ("fused sequential"), with the reduction in the epilogue.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_after_arrivals
from ...common.device.tile_scheduler import next_index, num_tiles, own_last, peers_first
from ...common.device.trace import STORE, trace_span
from ...common.portable.gemm import store_tile
from ...common.portable.partials import (
    COMPUTES_AND_SUMS,
    Sums,
    shards_of,
    signal_last_partial,
    signal_partial_tile,
    sum_tile,
    workspace_at_owner,
)
from ...common.portable.tile_loop import compute_tiles, wait_ready_once
from ...common.variants.implementation import Implementation, default_plan
from ...common.workspace import Buffer
from .. import host, prediction
from ..host import FAMILY, KEPT, ReduceCall
from ..problem import GemmReduceScatterProblem


@triton.jit
def send_partial(acc, target, work, peers, epoch, began, TILE: tl.constexpr):
    """Store a partial tile at its owner, and signal the one before; `target`: (staging, first index, step)."""
    staging, first, step = target
    began = wait_ready_once(first, work, peers, epoch, began, TILE.WORLD_SIZE)
    if work.index != first:
        tiles = num_tiles(shards_of(staging), TILE)
        signal_partial_tile(staging, peers, work.index - step, tiles, epoch, TILE)
    store_tile(acc, workspace_at_owner(staging, peers, work), work.row, work.col, peers, 1, TILE)
    trace_span(peers, STORE, work.index, began)


@triton.jit(launch_metadata=COMPUTES_AND_SUMS)
def gemm_reduce_scatter_fused_sequential(a, b, gemm, out, staging, peers, TILE: tl.constexpr):
    """Send the partial tiles of the peers' shards, then sum this rank's."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    shards = shards_of(staging)
    tiles = num_tiles(shards, TILE)
    sent = tiles * (TILE.WORLD_SIZE - 1)
    target = (staging, pid, step)
    compute_tiles((pid, step, sent), a, b, gemm, shards, target, peers, epoch, peers_first, send_partial, TILE)
    signal_last_partial(pid, step, staging, peers, sent, tiles, epoch, TILE)
    own = (next_index(pid, step, sent) - sent, step, tiles)
    compute_tiles(own, a, b, gemm, shards, Sums(out, staging, 0, 1), peers, epoch, own_last, sum_tile, TILE)
    finish_after_arrivals(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)


def plan(problem: GemmReduceScatterProblem, device: Device) -> GemmConfig:
    """Return the family's plan, wide tiles with four stages and the epilogue in halves."""
    # 0.547 ms for 8192x8192x8192 over 4 H200s, with three stages 0.559.
    config = default_plan(problem, device)
    return replace(config, num_stages=4, epilogue_subtiles=2) if config.block_n == 256 else config


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the family's buffers; partials are stored at their owners."""
    return {**KEPT.workspace(call), **host.workspace(call, keeps_partials=False)}


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    arguments = host.multiply_arguments(call, a, b)
    call.run(gemm_reduce_scatter_fused_sequential, call.config.num_sms, **arguments, out=KEPT.block(call))


VARIANT = Implementation(
    FAMILY,
    "fused_sequential",
    plan,
    workspace,
    launch,
    KEPT.outputs,
    predict=prediction.fused_sequential,
    place=(Arrangement.FUSED_KERNEL, Agent.COMPUTING_PROGRAM, Sync.NONE),
    summary="one kernel; each program stores its partial tile at the owner, own tiles last add the peers'",
)
