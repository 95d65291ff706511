"""GEMM + reduce-scatter in one kernel for small M: every SM reads a part of the weights, whatever the number of tiles.

Programs split tiles (../common/portable/stream_k.py). The one that fixes a tile up sends every owner of some of its
rows these rows, with a flag per rank and tile; where rows are this rank's own, it waits for the peers' partials and
adds them, as in ../common/portable/partials.py. Where rows are normed, the own rows of a tile go to this rank's
workspace, too, and programs end with rows: each waits for all ranks' tiles of its own, adds and norms them
(../../common/portable/row_norm.py).

The workspace is doubled, and calls use its halves alternately, so no rank waits for the peers: flags of the first tile
go to every rank, which waits for all of them, owner or not. So a rank that has ended a call has seen all peers' flags
in it, and they are done with the half of the call before. Flags hold call numbers and are never reset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris_core import gdc_wait, signal_each, translate, wait_each
from overlap_taxonomy import Agent, Arrangement, Schedule, Sync

from ...common.device.arguments import Block
from ...common.device.epilogue import finish_tile
from ...common.device.handshake import begin_own_call, end_own_call, on_every_rank
from ...common.device.tile_scheduler import num_tiles
from ...common.device.trace import STORE, SUM, WAIT, trace_span, trace_time
from ...common.portable import stream_k_host
from ...common.portable.gemm import rounded, subtile
from ...common.portable.partials import COMPUTES_AND_SUMS
from ...common.portable.row_norm import sum_and_norm_rows
from ...common.portable.stream_k import Halves, buffer_of_call, compute_stream_k
from ...common.variants.implementation import Implementation
from ...common.workspace import Buffer, flags_by_source
from .. import host, prediction
from ..host import FAMILY, KEPT, ReduceCall


@triton.jit
def rows_of_owner(staging, row, col, owner, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the offsets of a subtile of C in its owner's shard, and the mask of what belongs there."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    first = owner * staging.shard_rows
    inside = (rows >= first) & (rows < tl.minimum(first + staging.shard_rows, staging.m))
    offsets = (rows - first).to(tl.int64)[:, None] * staging.n + cols[None, :]
    return offsets, inside[:, None] & (cols < staging.n)[None, :]


@triton.jit
def send_subtile(
    acc,
    staging,
    workspace_ptr,
    peers,
    row,
    col,
    NEAREST: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Store every owner's rows of a subtile into this rank's partials there, those NEAREST ranks away and more."""
    value = rounded(acc, staging.workspace_ptr.dtype.element_ty)
    mine_ptr = workspace_ptr + tl.cast(peers.rank, tl.int64) * staging.shard_rows * staging.n
    for distance in tl.static_range(NEAREST, WORLD_SIZE):
        owner = (peers.rank + distance) % WORLD_SIZE
        offsets, mask = rows_of_owner(staging, row, col, owner, ROWS, COLS)
        tl.store(translate(mine_ptr, peers.rank, owner, peers.heap_bases) + offsets, value, mask=mask)


@triton.jit
def send_rows_to_owners(
    acc, staging, workspace_ptr, halves, peers, row, col, tile, tiles, epoch, NEAREST: tl.constexpr, TILE: tl.constexpr
):
    """Send every owner its rows of a tile, then signal the owners; of the first tile, all; those NEAREST ranks away."""
    SUBTILES: tl.constexpr = TILE.SUBTILES
    COLS: tl.constexpr = TILE.BLOCK_N // SUBTILES
    for index in tl.static_range(SUBTILES):
        half = subtile(acc, index, TILE)
        send_subtile(
            half, staging, workspace_ptr, peers, row, col + index * COLS, NEAREST, TILE.WORLD_SIZE, TILE.BLOCK_M, COLS
        )
    flag_ptrs, ranks = on_every_rank(_flags(staging, halves, epoch) + peers.rank * tiles + tile, peers, TILE.WORLD_SIZE)
    has_rows = _has_rows(staging, row, ranks, TILE) | (tile == 0)
    # Edge: this program's stores happen before what follows an owner's wait for the tile's flag.
    signal_each(flag_ptrs, epoch, (ranks >= 0) & ((NEAREST == 0) | (ranks != peers.rank)) & has_rows)


@triton.jit
def _flags(staging, halves, epoch):
    """Return where the flags of this call are; worked out where they are needed, as registers are wanting."""
    return staging.flags_ptr + buffer_of_call(epoch, 2) * halves.flags


@triton.jit
def _has_rows(staging, row, rank, TILE: tl.constexpr):
    """Whether a rank owns any of a tile's rows."""
    first = rank * staging.shard_rows
    return (tl.minimum(first + staging.shard_rows, staging.m) > tl.maximum(first, row)) & (first < row + TILE.BLOCK_M)


@triton.jit
def sum_own_rows(acc, out, staging, workspace_ptr, halves, peers, row, col, tile, tiles, epoch, TILE: tl.constexpr):
    """Wait for the peers' partials of a tile, add those of this rank's rows in the order rank+1, rank+2, …, store."""
    began = trace_time(peers)
    ranks = tl.arange(0, triton.next_power_of_2(TILE.WORLD_SIZE))
    is_peer = (ranks < TILE.WORLD_SIZE) & (ranks != peers.rank)
    wait_each(_flags(staging, halves, epoch) + ranks * tiles + tile, epoch, is_peer, peers.watchdog_ptr)
    began = trace_span(peers, WAIT, tile, began)
    SUBTILES: tl.constexpr = TILE.SUBTILES
    COLS: tl.constexpr = TILE.BLOCK_N // SUBTILES
    for index in tl.static_range(SUBTILES):
        half = subtile(acc, index, TILE)
        sum_own_subtile(half, out, staging, workspace_ptr, peers, row, col + index * COLS, TILE.BLOCK_M, COLS, TILE)
    trace_span(peers, SUM, tile, began)


@triton.jit
def sum_own_subtile(
    acc, out, staging, workspace_ptr, peers, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr
):
    """Add the peers' partials of this rank's rows of a subtile to its own, and store them."""
    offsets, mask = rows_of_owner(staging, row, col, peers.rank, ROWS, COLS)
    partial_size = tl.cast(staging.shard_rows, tl.int64) * staging.n
    # Not unrolled: one peer's partial in registers at a time.
    for distance in range(1, TILE.WORLD_SIZE):
        partial_ptr = workspace_ptr + (peers.rank + distance) % TILE.WORLD_SIZE * partial_size
        # .cg: the peer wrote it past this SM's L1, which may hold an older call's.
        acc += tl.load(partial_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    acc = finish_tile(acc, out.epilogue, row - peers.rank * staging.shard_rows, col, ROWS, COLS, TILE)
    tl.store(out.c_ptr + offsets, rounded(acc, out.c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def reduce_tile(acc, target, peers, row, col, tile, tiles, epoch, TILE: tl.constexpr):
    """Send the peers their rows of a tile, and sum this rank's."""
    out, staging, workspace_ptr, halves = target
    began = trace_time(peers)
    send_rows_to_owners(acc, staging, workspace_ptr, halves, peers, row, col, tile, tiles, epoch, 1, TILE)
    trace_span(peers, STORE, tile, began)
    if _has_rows(staging, row, peers.rank, TILE) | (tile == 0):
        sum_own_rows(acc, out, staging, workspace_ptr, halves, peers, row, col, tile, tiles, epoch, TILE)


@triton.jit
def send_all_rows(acc, target, peers, row, col, tile, tiles, epoch, TILE: tl.constexpr):
    """Send all ranks, this one too, their rows of a tile."""
    _, staging, workspace_ptr, halves = target
    began = trace_time(peers)
    send_rows_to_owners(acc, staging, workspace_ptr, halves, peers, row, col, tile, tiles, epoch, 0, TILE)
    trace_span(peers, STORE, tile, began)


@triton.jit
def norm_own_rows(whole, target, norm, peers, epoch, NORM: tl.constexpr, TILE: tl.constexpr):
    """Sum this program's share of this rank's rows, and norm them; program 0 waits for all ranks' first tile."""
    out, staging, workspace_ptr, halves = target
    flags_ptr = _flags(staging, halves, epoch)
    if tl.program_id(0) == 0:
        ranks = tl.arange(0, triton.next_power_of_2(TILE.WORLD_SIZE))
        first_ptrs = flags_ptr + ranks * num_tiles(whole, TILE)
        wait_each(first_ptrs, epoch, ranks < TILE.WORLD_SIZE, peers.watchdog_ptr)
    first_row = peers.rank * staging.shard_rows
    partial_size = tl.cast(staging.shard_rows, tl.int64) * staging.n
    sum_and_norm_rows(whole, first_row, workspace_ptr, partial_size, flags_ptr, out, norm, peers, epoch, NORM, TILE)


@triton.jit(launch_metadata=COMPUTES_AND_SUMS)
def gemm_reduce_scatter_fused_sequential_stream_k(
    a,
    b,
    gemm,
    out,
    staging,
    halves,
    stream_k,
    own,
    peers,
    norm,
    HAS_WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Send the peers their rows of each tile of this rank's product, and sum this rank's, or sum and norm them."""
    whole = Block(out.c_ptr, staging.m, staging.n, staging.n, out.epilogue)
    gdc_wait()
    epoch = begin_own_call(own)
    half = buffer_of_call(epoch, 2)
    target = (out, staging, staging.workspace_ptr + half * halves.data, halves)
    FINISH: tl.constexpr = reduce_tile if NORM is None else send_all_rows
    compute_stream_k(
        a, gemm.a_scale_ptr, b, gemm, whole, whole, 0, stream_k, target, peers, epoch, FINISH, HAS_WHOLE, SPLITS, TILE
    )
    if NORM is not None:
        norm_own_rows(whole, target, norm, peers, epoch, NORM, TILE)
    end_own_call(own, epoch)


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the buffers of partials and of flags, each in two halves, and those of C and of split tiles."""
    buffers = host.workspace(call, keeps_partials=False)
    tiles = stream_k_host.all_tiles(call)
    return {
        **KEPT.workspace(call),
        **stream_k_host.workspace(call),
        "staging": buffers["staging"]._replace(halves=2),
        "flags": flags_by_source(call.world_size, tiles, "tile", "partial sum", halves=2),
    }


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    stream_k_host.run(
        call,
        gemm_reduce_scatter_fused_sequential_stream_k,
        a,
        b,
        out=KEPT.block(call),
        staging=host.staging_of(call),
        halves=Halves(call.half_size("staging"), call.half_size("flags")),
        **call.norm(),
    )


VARIANT = Implementation(
    FAMILY,
    "fused_sequential",
    stream_k_host.plan,
    workspace,
    launch,
    KEPT.outputs,
    schedule=Schedule.STREAM_K,
    norms_rows=True,
    predict=prediction.fused_sequential_stream_k,
    place=(Arrangement.FUSED_KERNEL, Agent.COMPUTING_PROGRAM, Sync.SPLIT_FLAG),
    summary="one kernel for small M; programs split a tile (stream-K), one sends its rows to their owners and adds",
    former_name="one_shot",
)
