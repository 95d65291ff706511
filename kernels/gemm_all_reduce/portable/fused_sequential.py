"""GEMM + all-reduce in one kernel, one-shot, for small M: every rank sends its partial tiles to all, and all sum them.

Each rank's workspace has room for every rank's partial C, and a flag a rank and tile. A program stores each partial
tile on every rank, then signals it; when all its tiles are stored it takes them again, waits for the peers' and adds
all ranks' partials, its own too, in the order of the ranks, in fp32: every rank has the same bits, in every run. A
partial crosses the link once for every peer, but no sum has to travel a second time. Where rows are normed, programs
take rows in the place of tiles then (../../common/portable/row_norm.py). Flags hold call numbers and are never reset.
Pattern: arXiv 2511.12500, section 4 ("fused sequential").
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from iris_core import signal, translate, wait
from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_after_arrivals
from ...common.device.tile_scheduler import num_tiles, row_grouped, tile_origin
from ...common.device.trace import STORE, SUM, WAIT, trace_span, trace_time
from ...common.implementation import Implementation, default_plan
from ...common.portable.gemm import store_subtile, store_tile, subtile_offsets, unfinished_block
from ...common.portable.row_norm import sum_and_norm_rows
from ...common.portable.tile_loop import compute_tiles, wait_ready_once
from ...common.variants import variant_of
from ...common.workspace import Buffer, flags_by_source
from ...gemm_reduce_scatter.host import ReduceCall
from .. import host, prediction
from ..host import FAMILY, ONE_SHOT
from ..problem import GemmAllReduceProblem


@triton.jit
def send_everywhere(acc, target, work, peers, epoch, began, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Store a partial tile on every rank and signal it there; `target`: (this rank's partial, flags, first index)."""
    partial, flags_ptr, first = target
    began = wait_ready_once(first, work, peers, epoch, began, WORLD_SIZE)
    store_tile(acc, partial, work.row, work.col, peers, WORLD_SIZE, WORLD_SIZE, TILE)
    tiles = num_tiles(partial, TILE)
    for distance in tl.static_range(0, WORLD_SIZE):
        peer = (peers.rank + distance) % WORLD_SIZE
        # Edge: this tile's stores to the peer happen before what follows its wait for the flag.
        signal(translate(flags_ptr, peers.rank, peer, peers.heap_bases) + peers.rank * tiles + work.tile, epoch)
    trace_span(peers, STORE, work.index, began)


@triton.jit
def sum_tiles(
    first,
    step,
    out,
    workspace_ptr,
    flags_ptr,
    peers,
    epoch,
    ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum all ranks' partials of the tiles first, first + step, …, in the order of ranks, and store them."""
    tiles = num_tiles(out, TILE)
    partial_size = tl.cast(out.m, tl.int64) * out.n
    for tile in tl.range(first, tiles, step, num_stages=1):
        began = trace_time(peers)
        for rank in tl.static_range(0, WORLD_SIZE):
            wait(flags_ptr + rank * tiles + tile, epoch, peers.watchdog_ptr)
        began = trace_span(peers, WAIT, tile, began)
        row, col = tile_origin(tile, out, TILE)
        for chunk in range(TILE.BLOCK_M // ROWS):
            offsets, mask = subtile_offsets(out, row + chunk * ROWS, col, ROWS, TILE.BLOCK_N)
            total = tl.load(workspace_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            for rank in tl.static_range(1, WORLD_SIZE):
                partial_ptr = workspace_ptr + rank * partial_size
                total += tl.load(partial_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            store_subtile(total, out, row + chunk * ROWS, col, peers, 1, WORLD_SIZE, ROWS, TILE.BLOCK_N, TILE)
        trace_span(peers, SUM, tile, began)


@triton.jit(launch_metadata=ONE_SHOT)
def gemm_all_reduce_fused_sequential(
    a,
    b,
    gemm,
    out,
    workspace_ptr,
    flags_ptr,
    peers,
    norm,
    ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Send this rank's partial tiles to all ranks, then sum all ranks': tiles, or whole rows that are normed."""
    epoch = begin_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    tiles = num_tiles(out, TILE)
    partial_size = tl.cast(out.m, tl.int64) * out.n
    mine = unfinished_block(workspace_ptr + peers.rank * partial_size, out.m, out.n, out.n)
    target = (mine, flags_ptr, pid)
    compute_tiles(
        (pid, step, tiles), a, b, gemm, out, target, peers, epoch, row_grouped, send_everywhere, WORLD_SIZE, TILE
    )
    if NORM is None:
        sum_tiles(pid, step, out, workspace_ptr, flags_ptr, peers, epoch, ROWS, WORLD_SIZE, TILE)
    else:
        sum_and_norm_rows(
            out, 0, workspace_ptr, partial_size, flags_ptr, out, norm, peers, epoch, WORLD_SIZE, NORM, TILE
        )
    finish_after_arrivals(peers, epoch, tl.num_programs(0), WORLD_SIZE)


def plan(problem: GemmAllReduceProblem, device: Device) -> GemmConfig:
    """Return the family's plan; a wide tile is stored in halves."""
    config = default_plan(problem, device)
    # A whole one and its addresses at all ranks do not fit the registers.
    return replace(config, epilogue_subtiles=2) if config.block_n == 256 else config


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the buffers of C, of all ranks' partials, and of flags."""
    tiles = call.num_tiles(call.problem.m, call.problem.n)
    return {**host.workspace(call), "flags": flags_by_source(call.world_size, tiles, "tile", "partial sum")}


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    """Queue the kernel."""
    config = call.config
    call.run(
        gemm_all_reduce_fused_sequential,
        config.num_sms,
        **call.main_loop(a, b),
        out=host.block_of(call),
        workspace_ptr=call.memory["staging"],
        flags_ptr=call.memory["flags"],
        peers=call.peers(),
        ROWS=min(config.comm_rows, config.block_m),
        WORLD_SIZE=call.world_size,
        **call.norm(),
    )
    return host.outputs(call)


VARIANT = variant_of(
    Implementation(
        FAMILY,
        "fused_sequential",
        plan,
        workspace,
        launch,
        host.outputs,
        norms_rows=True,
        predict=prediction.fused_sequential,
    ),
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMPUTING_PROGRAM,
    sync=Sync.NONE,
    summary="one kernel, one-shot: each program stores its partial tile to every rank, then adds all ranks'",
)
