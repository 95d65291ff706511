"""All-gather + GEMM in one kernel for small M: every SM sends a chunk of the shard, then reads a chunk of the weights.

A program stores its chunk of this rank's shard into the gathered A of every rank, this one too, and counts it there.
Then it waits for all chunks of all ranks and multiplies its tiles, some of which programs split (stream_k.py).

The gathered A has two buffers, which calls use alternately, so no program waits for the peers to be ready: every
program of a call has seen all peers' chunks of that call, so a rank that is two calls further knows that they are done
with it. Who asks for the gathered A gets one buffer, and the ready signal. Counts grow over all calls and are never
reset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris_core import fence_before_descriptor_loads, gdc_wait, translate
from iris_core.backends.base import round_up
from overlap_taxonomy import Agent, Arrangement, Schedule, Sync

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
from ...common.device.trace import PUSH, STORE, WAIT, trace_span, trace_time
from ...common.portable import stream_k_host
from ...common.portable.gemm import store_tile
from ...common.portable.stream_k import buffer_of_call, compute_stream_k, with_columns
from ...common.workspace import Buffer
from .. import host, prediction
from ..host import GatherCall
from .shards import PUSHES_AND_MULTIPLIES, chunk_offsets, num_chunks_of, num_scale_chunks, scale_offsets

COLS = 1024  # of a chunk of the shard: what a program of 128 threads loads at once from a row


@triton.jit
def push_chunk(value, mask, dst, shard, peer_ptrs, WORLD_SIZE: tl.constexpr):
    """Store a chunk of the shard at every rank, this one first."""
    tl.store(shard.dst_ptr + dst, value, mask=mask)
    for peer in tl.static_range(WORLD_SIZE - 1):
        tl.store(peer_ptrs[peer] + dst, value, mask=mask)


@triton.jit
def push_scales_to_all(first, step, shard, offset, peers, WORLD_SIZE: tl.constexpr):
    """Store chunks first, first + step, … of the shard's scales at every rank, ahead of the shard's signal."""
    if shard.scale_src_ptr is not None:
        peer_ptrs = at_peers(shard.scale_dst_ptr, peers, WORLD_SIZE)
        for chunk in tl.range(first, num_scale_chunks(shard), step, num_stages=1):
            src, dst, mask = scale_offsets(shard, chunk)
            value = tl.load(shard.scale_src_ptr + src, mask=mask)
            tl.store(shard.scale_dst_ptr + offset + dst, value, mask=mask)
            for peer in tl.static_range(WORLD_SIZE - 1):
                tl.store(peer_ptrs[peer] + offset + dst, value, mask=mask)


@triton.jit
def at_peers(pointer, peers, WORLD_SIZE: tl.constexpr, DISTANCE: tl.constexpr = tl.constexpr(1)):
    """Return where a place on this rank's heap lies on the peers', from rank+DISTANCE to rank-1."""
    if DISTANCE == WORLD_SIZE:
        return ()
    else:
        nearest = (translate(pointer, peers.rank, (peers.rank + DISTANCE) % WORLD_SIZE, peers.heap_bases),)
        return nearest + at_peers(pointer, peers, WORLD_SIZE, DISTANCE + 1)


@triton.jit
def store_own_tile(acc, block, peers, row, col, tile, tiles, epoch, TILE: tl.constexpr):
    """Store a tile."""
    began = trace_time(peers)
    store_tile(acc, block, row, col, peers, 1, TILE)
    trace_span(peers, STORE, tile, began)


@triton.jit(launch_metadata=PUSHES_AND_MULTIPLIES)
def all_gather_gemm_fused_sequential_stream_k(
    a,
    b,
    gemm,
    block,
    columns,
    shard,
    push_programs,
    buffer_rows,
    scale_half,
    stream_k,
    own,
    peers,
    BUFFERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Gather A in one of BUFFERS, one below the other, and multiply it; the first `push_programs` push.

    The halves of A's scales are `scale_half` elements apart.
    """
    widest = with_columns(block, columns)
    pid = tl.program_id(0)
    peer_ptrs = at_peers(shard.dst_ptr, peers, TILE.WORLD_SIZE)
    src, dst, mask = chunk_offsets(shard, pid, ROWS, COLS)
    gdc_wait()
    # Under way while the call's number is.
    value = tl.load(shard.src_ptr + src, mask=mask & (pid < push_programs))
    epoch = begin_own_call(own)
    if BUFFERS == 1:
        signal_all_ready(peers, epoch, TILE.WORLD_SIZE)
        buffer_row = 0
        scale_offset = 0
    else:
        buffer_row = tl.cast(buffer_of_call(epoch, BUFFERS), tl.int32) * buffer_rows
        scale_offset = buffer_of_call(epoch, BUFFERS) * scale_half
    began = trace_time(peers)
    if pid < push_programs:
        if BUFFERS == 1:
            wait_all_ready(peers, epoch, TILE.WORLD_SIZE)
        offset = tl.cast(buffer_row, tl.int64) * shard.stride_dst_m
        push_chunk(value, mask, dst + offset, shard, peer_ptrs, TILE.WORLD_SIZE)
        for chunk in tl.range(pid + push_programs, num_chunks_of(shard, ROWS, COLS), push_programs, num_stages=1):
            src, dst, mask = chunk_offsets(shard, chunk, ROWS, COLS)
            value = tl.load(shard.src_ptr + src, mask=mask)
            push_chunk(value, mask, dst + offset, shard, peer_ptrs, TILE.WORLD_SIZE)
        push_scales_to_all(pid, push_programs, shard, scale_offset, peers, TILE.WORLD_SIZE)
        signal_chunk_to_all(peers, count_of_chunk(pid == 0, push_programs), TILE.WORLD_SIZE)
        began = trace_span(peers, PUSH, pid, began)
    wait_all_chunks(peers, epoch * COUNTS_OF_A_CALL, TILE.WORLD_SIZE)
    fence_before_descriptor_loads()
    trace_span(peers, WAIT, pid, began)
    scale_ptr = gemm.a_scale_ptr
    if scale_ptr is not None:  # whose row 0 is that of the first buffer
        scale_ptr += scale_offset - tl.cast(buffer_row, tl.int64) * gemm.stride_asm
    compute_stream_k(
        a,
        scale_ptr,
        b,
        gemm,
        block,
        widest,
        buffer_row,
        stream_k,
        block,
        peers,
        epoch,
        store_own_tile,
        HAS_WHOLE,
        SPLITS,
        TILE,
    )
    end_own_call(own, epoch)


def _buffer_rows(call: GatherCall) -> int:
    """Return whole tiles: one that reaches past the end of A reads nothing that a peer one call later may store."""
    return round_up(call.problem.m, call.config.block_m)


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffers of the gathered A, in two halves unless the caller reads it, of C, and of split tiles.

    A shard is quantised to a buffer of its own: which half it goes to is known on the device alone.
    """
    buffer = host.gathered_buffer(call, _buffer_rows(call))
    # A half begins with a row of A: there is room for one more.
    rows, distance = buffer.shape
    halves = buffer if host.keeps_gathered(call) else buffer._replace(shape=(rows + 1, distance), halves=2)
    scales = host.scale_buffer(call, call.problem.m, 1 if host.keeps_gathered(call) else 2)
    found = {"gathered": halves, **scales, **host.output_buffer(call), **stream_k_host.workspace(call)}
    if call.problem.is_quantised:
        shard = call.problem.a_shape(0)
        found["quantised"] = Buffer(shard, call.problem.dtype)
        found["quantised_scale"] = Buffer((shard[0], 1), torch.float32)
    return found


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel, behind what quantises this rank's shard."""
    memory = call.memory
    a = host.quantised(call, a, memory.get("quantised", a), memory.get("quantised_scale"), slice(a.shape[0]))
    problem, rows, room = call.problem, _buffer_rows(call), call.memory["gathered"]
    buffers = 1 if host.keeps_gathered(call) else 2
    distance = room.stride(0)
    apart = call.half_size("gathered") // distance  # rows between the halves
    both = room.as_strided((rows + (buffers - 1) * apart, problem.k), (distance, 1))
    programs = stream_k_host.stream_k_plan(call).programs
    chunks = -(-problem.a_shape(0)[0] // call.config.comm_rows) * -(-problem.k // COLS)
    stream_k_host.run(
        call,
        all_gather_gemm_fused_sequential_stream_k,
        both,
        b,
        a_scale=host.gathered_scale(call),
        **{**host.push_arguments(call, a), "COLS": COLS},
        block=host.block_of(call),
        columns=stream_k_host.columns(call),
        push_programs=min(chunks, programs),  # the same on all ranks, also where one has no rows
        buffer_rows=apart,
        scale_half=call.half_size("gathered_scale") if problem.scales else 0,
        BUFFERS=buffers,
    )


VARIANT = host.implementation(
    "fused_sequential",
    stream_k_host.plan,
    workspace,
    launch,
    schedule=Schedule.STREAM_K,
    counts_chunks=True,
    predict=prediction.fused_sequential_stream_k,
    place=(Arrangement.FUSED_KERNEL, Agent.COMPUTING_PROGRAM, Sync.SHARD_COUNTER),
    summary="one kernel for small M; programs push chunks of the shard, then split tiles between them (stream-K)",
    former_name="one_shot",
    retired={"fused_sequential:portable": "fused_sequential"},
)
