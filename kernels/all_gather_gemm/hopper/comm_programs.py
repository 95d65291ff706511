"""Comm programs, which send this rank's shard of A to the peers: a warp copies operand tiles through shared memory.

The shard is cut into row chunks, and each of these into k chunks: such a chunk is what peers wait for. Chunks are sent
in order, each by all comm programs at once, which take its tiles in turn; a tile is loaded once and stored to every
peer. Then each program counts its tiles of the chunk at the peers, at ``counts[rank, chunk]``: a chunk has come when so
many tiles have been counted. The last program of a call zeroes the counts.

The engine that moves tiles takes requests in order, and stores to peers wait for the link. Programs that multiply would
wait for their operands behind them, so a comm program does nothing else (results/notebook.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from iris_core import translate, wait

from ...common.device.handshake import wait_ready_of
from ...common.device.trace import PUSH, trace_span, trace_time
from ...common.hopper.arguments import LoadGate
from ...common.hopper.epilogue_store import wait_stores_arrived
from ...common.hopper.gluon_names import reinterpret, thread_barrier, tma_store
from ...common.hopper.pipeline import (
    bytes_of,
    commit_signal,
    consumer_release,
    consumer_wait,
    load_lines,
    pipeline_state,
    producer_commit,
)

SCALES_AT_ONCE = gl.constexpr(128)  # that the warp moves
LAG = gl.constexpr(4)  # tiles that are sent before an earlier one is signalled: its arrival takes microseconds


class SentShard(NamedTuple):
    """A rank's shard of A, the same in size on all ranks but the last ones, and where its chunks are counted.

    `rows` are this rank's, `k` the columns. A chunk has `chunk_rows` and `chunk_columns`. There are `chunks`,
    `k_chunks` of each row chunk, and `chunk_tiles` are counted for each, those past the shard's end too. There are so
    many `comm_programs`, none where there is no peer to send to.
    """

    counts_ptr: Any
    rows: int
    k: int
    chunk_rows: int
    chunk_columns: int
    k_chunks: int
    chunks: int
    chunk_tiles: int
    comm_programs: int


@gluon.jit
def send_shard(a, everywhere, pipeline, signals, shard, scales, peers, epoch, TILE: gl.constexpr):
    """Send this program's tiles of the shard to every peer, chunk by chunk, by one warp.

    `a` is the shard's descriptor, `everywhere` that of its place at every rank, (rank, rows, columns): what reaches
    past their end is not stored. The operand pipeline's memory is free in a comm program. A chunk's tiles are signalled
    when LAG more have been sent, by when they have arrived. With a tile of the first k chunk go all scales of its rows,
    of the `Shard` that `scales` is, or None: all loads of a tile begin behind that chunk's count.
    """
    STAGES: gl.constexpr = TILE.STAGES
    stages = reinterpret(pipeline.a, a.dtype, [STAGES, 1, TILE.BLOCK_M, TILE.BLOCK_K], everywhere.layout)
    mine = _num_tiles(shard)
    moved = gl.where(shard.rows > 0, mine, 0)
    for number in range(gl.minimum(STAGES - 1, moved)):
        _load_tile(a, pipeline, shard, number, TILE)
    if mine > 0:
        for distance in range(1, TILE.WORLD_SIZE):
            wait_ready_of(peers, (peers.rank + distance) % TILE.WORLD_SIZE, epoch)
    signalled = 0
    began = trace_time(peers)
    for number in range(gl.where(mine > 0, mine + LAG, 0)):
        if number < moved:
            row, col = _tile_of(number, shard, TILE)
            if scales is not None:
                if col == 0:
                    _send_scales(scales, row, peers, TILE)
            state = pipeline_state(pipeline.barriers, number)
            consumer_wait(pipeline.barriers, state)
            for distance in range(1, TILE.WORLD_SIZE):
                peer = (peers.rank + distance) % TILE.WORLD_SIZE
                tma_store(everywhere, [peer, row, col], stages.index(state.index))
        if number + STAGES - 1 < moved:
            tma.store_wait(TILE.WORLD_SIZE - 1)  # the tile before this one has been read, its stage is free
            _load_tile(a, pipeline, shard, number + STAGES - 1, TILE)
        if number >= LAG:
            if _ends_chunk(number - LAG, shard):
                if number < mine:
                    wait_stores_arrived(LAG * (TILE.WORLD_SIZE - 1))
                else:
                    wait_stores_arrived()
                commit_signal(signals, signalled)
                began = trace_span(peers, PUSH, signalled, began)
                signalled += 1


@gluon.jit
def _send_scales(scales, row, peers, TILE: gl.constexpr):
    """Store the scales of a tile's rows at every peer, by one warp; the tile's count is theirs, too."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first = row * scales.scale_columns
    stop = gl.minimum(row + TILE.BLOCK_M, scales.rows) * scales.scale_columns
    for begin in range(first, stop, SCALES_AT_ONCE):
        dst = begin + gl.arange(0, SCALES_AT_ONCE, LAYOUT)
        src = dst // scales.scale_columns * scales.stride_scale_m + dst % scales.scale_columns * scales.stride_scale_k
        value = gl.load(scales.scale_src_ptr + src, mask=dst < stop, other=0.0)
        for distance in range(1, TILE.WORLD_SIZE):
            peer = (peers.rank + distance) % TILE.WORLD_SIZE
            peer_ptr = translate(scales.scale_dst_ptr, peers.rank, peer, peers.heap_bases)
            gl.store(peer_ptr + dst, value, mask=dst < stop)
    thread_barrier()  # the signal of the tile is one thread's


@gluon.jit
def signal_chunks(signals, shard, peers, epoch, TILE: gl.constexpr):
    """Count this program's tiles at the peers, chunk by chunk, when they have arrived there; by one warp."""
    signalled = 0
    counted = 0
    for number in range(_num_tiles(shard)):
        counted += 1
        if _ends_chunk(number, shard):
            chunk = (gl.program_id(0) + number * shard.comm_programs) // shard.chunk_tiles
            consumer_wait(signals, pipeline_state(signals, signalled))
            release_to_peers()
            for distance in range(1, TILE.WORLD_SIZE):
                count_tiles(shard, peers, (peers.rank + distance) % TILE.WORLD_SIZE, chunk, counted)
            consumer_release(signals, 0)
            signalled += 1
            counted = 0


@gluon.jit
def _num_tiles(shard):
    """Return how many tiles are this program's."""
    left = gl.maximum(shard.chunks * shard.chunk_tiles - gl.program_id(0), 0)
    return gl.where(gl.program_id(0) < shard.comm_programs, gl.cdiv(left, gl.maximum(shard.comm_programs, 1)), 0)


@gluon.jit
def _ends_chunk(number, shard):
    """Whether a program's `number`-th tile is its last of a chunk."""
    tile = gl.program_id(0) + number * shard.comm_programs
    return (tile + shard.comm_programs) // shard.chunk_tiles > tile // shard.chunk_tiles


@gluon.jit
def _tile_of(number, shard, TILE: gl.constexpr):
    """Return the row and the column of a program's `number`-th tile."""
    columns = shard.chunk_columns // TILE.BLOCK_K
    tile = gl.program_id(0) + number * shard.comm_programs
    chunk = tile // shard.chunk_tiles
    tile = tile % shard.chunk_tiles
    row = chunk // shard.k_chunks * shard.chunk_rows + tile // columns * TILE.BLOCK_M
    return row, chunk % shard.k_chunks * shard.chunk_columns + tile % columns * TILE.BLOCK_K


@gluon.jit
def _load_tile(a, pipeline, shard, number, TILE: gl.constexpr):
    stage = pipeline_state(pipeline.barriers, number).index
    full = pipeline.barriers.full.index(stage)
    row, col = _tile_of(number, shard, TILE)
    producer_commit(pipeline.barriers, stage, bytes_of(TILE.BLOCK_M, a.block_type))
    load_lines(a, row, col, full, pipeline.a.index(stage))


@gluon.jit
def release_to_peers():
    """fence.acq_rel.sys: publishes prior writes to any observer of a later relaxed store by this thread.

    One fence serves all peers.
    """
    gl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@triton.jit
def count_tiles(shard, peers, peer, chunk, tiles):
    """Count more tiles of a chunk of this rank's shard at a peer.

    Edge: none of its own; with `release_to_peers` before it, to the peer's wait for the count.
    """
    counts_ptr = translate(shard.counts_ptr, peers.rank, peer, peers.heap_bases)
    count_ptr = counts_ptr + peers.rank * shard.chunks + chunk
    tl.atomic_add(count_ptr, tl.cast(tiles, tl.int64), sem="relaxed", scope="sys")


@gluon.jit
def await_k_chunks(shard, work, split, arrived, peers, TILE: gl.constexpr):
    """Leave the waiting for a tile's row chunk to the loads from its k chunks: a gate of load_tiles.

    `arrived` counts the row chunks of the peers' shards that have come, in the order of their use.
    """
    PEERS: gl.constexpr = max(TILE.WORLD_SIZE - 1, 1)
    counts_ptr = shard.counts_ptr + work.owner * shard.chunks + work.turn // PEERS * shard.k_chunks
    steps = shard.chunk_columns // TILE.BLOCK_K
    gate = LoadGate(counts_ptr, shard.chunk_tiles, steps, 0, work.turn < arrived, peers.watchdog_ptr)
    return gate, work.turn + 1


@gluon.jit
def wait_all_shards(shard, peers, TILE: gl.constexpr):
    """Wait until all chunks of all peers' shards have come."""
    for index in range(TILE.WORLD_SIZE * shard.chunks):
        if index // shard.chunks != peers.rank:
            wait(shard.counts_ptr + index, shard.chunk_tiles, peers.watchdog_ptr)
