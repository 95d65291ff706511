"""GEMM + all-scatter in one kernel for small M: every SM reads a part of the weights, whatever the number of tiles.

Programs split tiles (../common/portable/stream_k.py); the one that fixes a tile up stores it to every rank. It waits
for the peers to be ready just before, and counts the tile on every rank just after, all at once. The first program ends
when every rank, its own too, has counted all its tiles here. Counts grow over all calls and are never reset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris_core import gdc_wait
from overlap_taxonomy import Agent, Arrangement, Schedule, Sync

from ...common.call import Call
from ...common.device.handshake import (
    COUNTS_OF_A_CALL,
    begin_own_call,
    count_of_chunk,
    end_own_call,
    signal_all_ready,
    signal_chunk_to_all,
    wait_all_chunks,
    wait_all_ready,
)
from ...common.device.trace import STORE, WAIT, trace_span, trace_time
from ...common.portable import stream_k_host
from ...common.portable.gemm import store_tile
from ...common.portable.stream_k import compute_stream_k, with_columns
from ...common.variants.implementation import Implementation
from ...common.workspace import Buffer
from .. import host, prediction
from ..host import FAMILY, MULTIPLIES_AND_PUSHES
from ..problem import GemmAllScatterProblem


@triton.jit
def send_tile(acc, block, peers, row, col, tile, tiles, epoch, TILE: tl.constexpr):
    """Store a tile to every rank when the peers are ready, and count it there."""
    began = trace_time(peers)
    wait_all_ready(peers, epoch, TILE.WORLD_SIZE)
    began = trace_span(peers, WAIT, tile, began)
    store_tile(acc, block, row, col, peers, TILE.WORLD_SIZE, TILE)
    signal_chunk_to_all(peers, count_of_chunk(tile == 0, tiles), TILE.WORLD_SIZE)
    trace_span(peers, STORE, tile, began)


@triton.jit(launch_metadata=MULTIPLIES_AND_PUSHES)
def gemm_all_scatter_fused_sequential_stream_k(
    a, b, gemm, block, columns, stream_k, own, peers, HAS_WHOLE: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    """Compute this rank's block of C into every rank's C."""
    gdc_wait()
    epoch = begin_own_call(own)
    signal_all_ready(peers, epoch, TILE.WORLD_SIZE)
    widest = with_columns(block, columns)
    compute_stream_k(
        a,
        gemm.a_scale_ptr,
        b,
        gemm,
        block,
        widest,
        0,
        stream_k,
        block,
        peers,
        epoch,
        send_tile,
        HAS_WHOLE,
        SPLITS,
        TILE,
    )
    if tl.program_id(0) == 0:
        began = trace_time(peers)
        wait_all_chunks(peers, epoch * COUNTS_OF_A_CALL, TILE.WORLD_SIZE)
        trace_span(peers, WAIT, 0, began)
    end_own_call(own, epoch)


def workspace(call: Call[GemmAllScatterProblem]) -> dict[str, Buffer]:
    """Return the buffers of C and of split tiles."""
    return {**host.workspace(call), **stream_k_host.workspace(call)}


def launch(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    stream_k_host.run(
        call,
        gemm_all_scatter_fused_sequential_stream_k,
        a,
        b,
        block=host.block_of(call),
        columns=stream_k_host.columns(call),
    )


VARIANT = Implementation(
    FAMILY,
    "fused_sequential",
    stream_k_host.plan,
    workspace,
    launch,
    host.outputs,
    schedule=Schedule.STREAM_K,
    counts_chunks=True,
    predict=prediction.fused_sequential_stream_k,
    place=(Arrangement.FUSED_KERNEL, Agent.COMPUTING_PROGRAM, Sync.SPLIT_FLAG),
    summary="one kernel for small M; programs split a tile (stream-K), one of them stores it to every rank",
    former_name="one_shot",
)
