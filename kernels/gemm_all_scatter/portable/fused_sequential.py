"""GEMM + all-scatter in one kernel: the program that computed a tile stores it to every rank in its epilogue.

Nothing is synchronised inside a rank. A program waits once, after its first tile, until the peers are ready. The last
program to arrive ends the call. Pattern: arXiv 2511.12500, section 4 ("fused sequential").
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Call, Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_call
from ...common.device.tile_scheduler import num_tiles, row_grouped
from ...common.device.trace import STORE, trace_span
from ...common.portable.gemm import store_tile
from ...common.portable.tile_loop import compute_tiles, wait_ready_once, with_numbers
from ...common.variants.implementation import Implementation, default_plan
from .. import host, prediction
from ..host import FAMILY, MULTIPLIES_AND_PUSHES
from ..problem import GemmAllScatterProblem


@triton.jit
def store_everywhere(acc, target, work, peers, epoch, began, TILE: tl.constexpr):
    """Store a tile to every rank's C, this one's first; `target`: (block, first index)."""
    block, first = target
    began = wait_ready_once(first, work, peers, epoch, began, TILE.WORLD_SIZE)
    store_tile(acc, block, work.row, work.col, peers, TILE.WORLD_SIZE, TILE)
    trace_span(peers, STORE, work.index, began)


@triton.jit(launch_metadata=MULTIPLIES_AND_PUSHES)
def gemm_all_scatter_fused_sequential(a, b, gemm, block, peers, TILE: tl.constexpr):
    """Compute this rank's block of C into every rank's C."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    pid = tl.program_id(0)
    indices = (pid, tl.num_programs(0), num_tiles(block, TILE))
    target = (with_numbers(block), pid)
    compute_tiles(indices, a, b, gemm, block, target, peers, epoch, row_grouped, store_everywhere, TILE)
    finish_call(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)


def plan(problem: GemmAllScatterProblem, device: Device) -> GemmConfig:
    """Return the default plan with a tile half as wide, stored in two subtiles."""
    # Stores come in smaller bursts, and fewer are left after the last tile: 0.570 ms for 8192x8192x8192 over 4 H200s,
    # against 0.619 with 128x256.
    config = default_plan(problem, device)
    if config.block_n != 256:
        return config
    return replace(config, block_n=128, num_warps=4, num_stages=4, epilogue_subtiles=2)


def launch(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    call.run(gemm_all_scatter_fused_sequential, call.config.num_sms, **host.compute_arguments(call, a, b))


VARIANT = Implementation(
    FAMILY,
    "fused_sequential",
    plan,
    host.workspace,
    launch,
    host.outputs,
    predict=prediction.fused_sequential,
    place=(Arrangement.FUSED_KERNEL, Agent.COMPUTING_PROGRAM, Sync.NONE),
    summary="one kernel; each program stores its tile to every rank",
)
