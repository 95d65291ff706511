"""This rank's shard of A on its way to the peers: a warp of some programs copies pieces of it, through shared memory.

The shard is cut into groups of rows, and each group into chunks of columns: a part is a chunk of a group, which peers
wait for. Parts are sent in order, each by all sending programs at once, which take its pieces in turns; a piece is
loaded once and stored to every peer. Then each program counts its pieces of the part at the peers, at
``counts[rank, part]``: a part has come when so many pieces have been counted over all calls. Counts are never reset.

The engine that moves tiles takes requests in order, and stores to peers wait for the link. Programs that multiply would
wait for their operands behind them, so a program that sends does nothing else (results/notebook.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris_core import translate, wait

from ..common.handshake import wait_ready_of
from ..common.hopper.arguments import Gate
from ..common.hopper.herald import hear, said, tell
from ..common.hopper.outbox import await_arrival
from ..common.trace import PUSH, trace_span, trace_time

LAG = gl.constexpr(4)  # pieces that are sent before an earlier one is announced: its arrival takes microseconds


class Consignment(NamedTuple):
    """A rank's shard of A, the same in size on all ranks but the last ones, and where its parts are counted.

    `rows` are this rank's, `k` the columns. A group has `group_rows`, a chunk `chunk_columns`. There are `parts`,
    `chunks` of each group, and `pieces` are counted for each, those past the shard's end too. `senders` programs send
    them, none where there is nobody to send to.
    """

    counts_ptr: Any
    rows: int
    k: int
    group_rows: int
    chunk_columns: int
    chunks: int
    parts: int
    pieces: int
    senders: int


@gluon.jit
def send_shard(a, everywhere, ring, herald, shard, peers, epoch, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Send this program's pieces of the shard to every peer, in the order of their parts, by one warp.

    `a` is the shard's descriptor, `everywhere` that of its place at every rank, (rank, rows, columns): what reaches
    past their end is not stored. The ring's memory is free in a program that sends. A part's pieces are announced when
    LAG more have been sent, by when they have arrived.
    """
    STAGES: gl.constexpr = TILE.STAGES
    pieces = ring.a._reinterpret(a.dtype, [STAGES, 1, TILE.BLOCK_M, TILE.BLOCK_K], everywhere.layout)
    mine = _num_pieces(shard)
    moved = gl.where(shard.rows > 0, mine, 0)
    for message in range(gl.minimum(STAGES - 1, moved)):
        _load_piece(a, ring, shard, message, TILE)
    if mine > 0:
        for distance in range(1, WORLD_SIZE):
            wait_ready_of(peers, (peers.rank + distance) % WORLD_SIZE, epoch)
    announced = 0
    began = trace_time(peers)
    for message in range(gl.where(mine > 0, mine + LAG, 0)):
        if message < moved:
            row, col = _place_of(message, shard, TILE)
            mbarrier.wait(ring.loaded.index(message % STAGES), (message // STAGES) & 1)
            for distance in range(1, WORLD_SIZE):
                peer = (peers.rank + distance) % WORLD_SIZE
                tma.async_copy_shared_to_global(everywhere, [peer, row, col], pieces.index(message % STAGES))
        if message + STAGES - 1 < moved:
            tma.store_wait(WORLD_SIZE - 1)  # the piece before this one has been read, its stage is free
            _load_piece(a, ring, shard, message + STAGES - 1, TILE)
        if message >= LAG:
            if _ends_part(message - LAG, shard):
                if message < mine:
                    await_arrival(LAG * (WORLD_SIZE - 1))
                else:
                    await_arrival()
                tell(herald, announced)
                began = trace_span(peers, PUSH, announced, began)
                announced += 1


@gluon.jit
def count_parts(herald, shard, peers, epoch, WORLD_SIZE: gl.constexpr):
    """Count this program's pieces at the peers, part by part, when they have arrived there; by one warp."""
    announced = 0
    counted = 0
    for message in range(_num_pieces(shard)):
        counted += 1
        if _ends_part(message, shard):
            part = (gl.program_id(0) + message * shard.senders) // shard.pieces
            hear(herald, announced)
            release_to_peers()
            for distance in range(1, WORLD_SIZE):
                count_pieces(shard, peers, (peers.rank + distance) % WORLD_SIZE, part, counted)
            said(herald)
            announced += 1
            counted = 0


@gluon.jit
def _num_pieces(shard):
    """Return how many pieces are this program's."""
    left = gl.maximum(shard.parts * shard.pieces - gl.program_id(0), 0)
    return gl.where(gl.program_id(0) < shard.senders, gl.cdiv(left, gl.maximum(shard.senders, 1)), 0)


@gluon.jit
def _ends_part(message, shard):
    """Whether a program's `message`-th piece is its last of a part."""
    piece = gl.program_id(0) + message * shard.senders
    return (piece + shard.senders) // shard.pieces > piece // shard.pieces


@gluon.jit
def _place_of(message, shard, TILE: gl.constexpr):
    """Return the row and the column of a program's `message`-th piece."""
    columns = shard.chunk_columns // TILE.BLOCK_K
    piece = gl.program_id(0) + message * shard.senders
    part = piece // shard.pieces
    piece = piece % shard.pieces
    row = part // shard.chunks * shard.group_rows + piece // columns * TILE.BLOCK_M
    return row, part % shard.chunks * shard.chunk_columns + piece % columns * TILE.BLOCK_K


@gluon.jit
def _load_piece(a, ring, shard, message, TILE: gl.constexpr):
    loaded = ring.loaded.index(message % TILE.STAGES)
    row, col = _place_of(message, shard, TILE)
    mbarrier.expect(loaded, a.block_type.nbytes)
    tma.async_copy_global_to_shared(a, [row, col], loaded, ring.a.index(message % TILE.STAGES))


@gluon.jit
def release_to_peers():
    """Let whoever sees a later relaxed store of this thread see all that it has seen: one fence for all peers."""
    gl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@triton.jit
def count_pieces(shard, peers, peer, part, pieces):
    """Count more pieces of a part of this rank's shard at a peer.

    Edge: none of its own; with `release_to_peers` before it, to the peer's wait for the count.
    """
    counts_ptr = translate(shard.counts_ptr, peers.rank, peer, peers.heap_bases)
    part_ptr = counts_ptr + peers.rank * shard.parts + part
    tl.atomic_add(part_ptr, tl.cast(pieces, tl.int64), sem="relaxed", scope="sys")


@gluon.jit
def gate_of(shard, peers, epoch, peer, group, is_open, TILE: gl.constexpr):
    """Return what must be waited for before a group of rows of a peer's shard is read."""
    counts_ptr = shard.counts_ptr + peer * shard.parts + group * shard.chunks
    return Gate(counts_ptr, epoch * shard.pieces, shard.chunk_columns // TILE.BLOCK_K, 0, is_open, peers.watchdog_ptr)


@gluon.jit
def wait_all(shard, peers, epoch, WORLD_SIZE: gl.constexpr):
    """Wait until all parts of all peers' shards have come."""
    for index in range(WORLD_SIZE * shard.parts):
        if index // shard.parts != peers.rank:
            wait(shard.counts_ptr + index, epoch * shard.pieces, peers.watchdog_ptr)
