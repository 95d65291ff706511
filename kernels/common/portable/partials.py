"""What families that sum over ranks share: partial tiles of C are computed, sent to their owner, and summed there.

C is cut into shards of rows, one per rank, and a rank computes a partial sum of every tile of every shard. It starts
with the shard of rank+1, or with FULLY_CONNECTED with a tile of each peer's in turn, and ends with its own, so that the
peers' partials of its own have had most of the time to arrive.

Every rank has a staging buffer on the heap with room for each rank's partial of this shard, and a flag for each rank
and tile. The rank that stores a partial tile there sets its flag to the call's number: nothing is reset. Partials
travel in the output's dtype; the sum starts from the own partial in fp32 registers, adds the peers' in the order
rank+1, rank+2, … and is rounded once: the same bits in every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris_core import signal, translate, wait
from iris_core.device.cache_key import in_cache_key

from ..device.handshake import COUNTS_OF_A_CALL, wait_chunks, wait_ready
from ..device.tile_scheduler import Shards, num_tiles, peers_first, place_by_shard
from ..device.trace import PUSH, PUSH_WAIT, SUM, WAIT, trace_span, trace_time
from ..launch.launch_metadata import Arguments, launch_metadata, peers_of, size_of_shard
from .gemm import shard_of, store_subtile, subtile, subtile_offsets, unfinished_block


class Staging(NamedTuple):
    """Where partial tiles arrive, on the heap.

    `workspace_ptr` points at (world_size, shard_rows, n), `flags_ptr` at (world_size, tiles of a shard) int64; the
    first index is the source rank. `partial_ptr` is this rank's own (world_size, shard_rows, n), where variants that
    send from memory put what they send; the first index is the owner. The last of the n columns may belong to no column
    of C.
    """

    workspace_ptr: Any
    flags_ptr: Any
    partial_ptr: Any
    shard_rows: int
    m: int
    n: int


@in_cache_key
class Sums(NamedTuple):
    """What `sum_tile` takes: the block of the sums, which are stored to DESTINATIONS ranks, and where partials arrive.

    These are awaited by a flag per tile and peer, or with CHUNKS by so many per shard, which come in their order. Made
    where it is passed: given a name, its constants become tensors (Triton 3.6).
    """

    out: Any
    staging: Any
    CHUNKS: Any
    DESTINATIONS: Any


def _own_rows(args: Arguments) -> int:
    return size_of_shard(args["staging"].m, args["staging"].shard_rows, args["peers"].rank)


def _peers_rows(args: Arguments) -> int:
    return int(args["staging"].m) - _own_rows(args)


def _sent(args: Arguments) -> int:
    return _peers_rows(args) * int(args["staging"].n)


def _added(args: Arguments) -> int:
    """Return how many elements of peers' partials are read, and of sums are stored to peers."""
    destinations = int(args.get("DESTINATIONS", 1))
    return _own_rows(args) * int(args["staging"].n) * (peers_of(args) + destinations - 1)


COMPUTES_ALL = launch_metadata(product=lambda args: (args["staging"].m, args["staging"].n, args["gemm"].k))
COMPUTES_FOR_PEERS = launch_metadata(product=lambda args: (_peers_rows(args), args["staging"].n, args["gemm"].k))
PUSHES = launch_metadata(moved=_sent)
SUMS = launch_metadata(product=lambda args: (_own_rows(args), args["staging"].n, args["gemm"].k), moved=_added)
PULLS = launch_metadata(moved=lambda args: _added(args) + 2 * _own_rows(args) * args["staging"].n)
COMPUTES_AND_SUMS = launch_metadata(
    product=lambda args: (args["staging"].m, args["staging"].n, args["gemm"].k),
    moved=lambda args: _sent(args) + _added(args),
)


@triton.jit
def shards_of(staging):
    """Return C as shards, whose tiles `peers_first` orders; a rank's A has the rows of all of them."""
    return Shards(staging.shard_rows, staging.n, staging.m, staging.shard_rows)


@triton.jit
def own_partials(staging):
    """Return where this rank keeps its partials of all shards until they are sent, as a block."""
    return unfinished_block(staging.partial_ptr, staging.m, staging.n, staging.n)


@triton.jit
def workspace_at_owner(staging, peers, work):
    """Return this rank's partial in the staging buffer of a work tile's owner, as a block."""
    workspace_ptr = translate(staging.workspace_ptr, peers.rank, work.owner, peers.heap_bases)
    return unfinished_block(partial_ptr(workspace_ptr, staging, peers.rank), work.m, staging.n, staging.n)


@triton.jit
def partial_ptr(base_ptr, staging, index):
    """Return where a rank's partial is among those of all ranks, which are as large as the largest."""
    return base_ptr + tl.cast(index, tl.int64) * staging.shard_rows * staging.n


@triton.jit
def signal_partial(staging, peers, index, tiles, epoch, WORLD_SIZE: tl.constexpr):
    """Signal to a tile's owner that this rank's partial of it is there; `index` counts tiles shard after shard.

    Edge: this program's stores happen before what follows the owner's wait for the flag.
    """
    owner = (peers.rank + 1 + index // tiles) % WORLD_SIZE
    flags_ptr = translate(staging.flags_ptr, peers.rank, owner, peers.heap_bases)
    signal(flags_ptr + peers.rank * tiles + index % tiles, epoch)


@triton.jit
def signal_partial_tile(staging, peers, index, tiles, epoch, TILE: tl.constexpr):
    """As `signal_partial`, of a tile by its place in the order in which they are computed."""
    signal_partial(staging, peers, place_by_shard(index, tiles, TILE), tiles, epoch, TILE.WORLD_SIZE)


@triton.jit
def signal_last_partial(first, step, staging, peers, sent, tiles, epoch, TILE: tl.constexpr):
    """Signal the last of a program's partial tiles first, first + step, … before `sent`, if it had any."""
    if first < sent:
        index = first + (sent - 1 - first) // step * step
        signal_partial_tile(staging, peers, index, tiles, epoch, TILE)


@triton.jit
def sum_tile(acc, sums, work, peers, epoch, began, TILE: tl.constexpr):
    """Add the peers' partials of an own tile, when they have come, and store the sum; a finish of compute_tiles.

    Peers' readiness needs no wait, though sums may be stored there: a partial of every peer's is awaited.
    """
    WORLD_SIZE: tl.constexpr = TILE.WORLD_SIZE
    for distance in tl.static_range(1, WORLD_SIZE):
        peer = (peers.rank + distance) % WORLD_SIZE
        if sums.CHUNKS == 0:
            tiles = num_tiles(shards_of(sums.staging), TILE)
            wait(sums.staging.flags_ptr + peer * tiles + work.tile, epoch, peers.watchdog_ptr)
        else:
            chunk = work.row // (TILE.BLOCK_M * TILE.GROUP_M)
            # The last one counts for all that is missing to a call's counts.
            count = tl.where(chunk == sums.CHUNKS - 1, COUNTS_OF_A_CALL, chunk + 1)
            wait_chunks(peers, peer, (epoch - 1) * COUNTS_OF_A_CALL + count, WORLD_SIZE)
    began = trace_span(peers, WAIT, work.index, began)
    SUBTILES: tl.constexpr = TILE.SUBTILES
    COLS: tl.constexpr = TILE.BLOCK_N // SUBTILES
    for index in tl.static_range(SUBTILES):
        half = subtile(acc, index, TILE)
        _sum_subtile(half, sums, peers, work.row, work.col + index * COLS, TILE.BLOCK_M, COLS, TILE)
    trace_span(peers, SUM, work.index, began)


@triton.jit
def _sum_subtile(acc, sums, peers, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr):
    offsets, mask = subtile_offsets(sums.out, row, col, ROWS, COLS)
    # Not unrolled: one peer's partial in registers at a time.
    for distance in range(1, TILE.WORLD_SIZE):
        peer = (peers.rank + distance) % TILE.WORLD_SIZE
        peer_ptr = partial_ptr(sums.staging.workspace_ptr, sums.staging, peer)
        # .cg: the peer wrote it past this SM's L1, which may hold an older call's.
        acc += tl.load(peer_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    store_subtile(acc, sums.out, row, col, peers, sums.DESTINATIONS, ROWS, COLS, TILE)


@triton.jit
def push_partial_tiles(first, step, epoch, staging, peers, flags_ptr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Copy partial tiles first, first + step, … to their owners, ROWS rows at a time, and signal them.

    In the order in which they are computed, each after its flag. A tile is signalled when the next one is there to be
    sent: the release then finds its stores arrived, and does not wait for them.
    """
    began = trace_time(peers)
    wait_ready(peers, epoch, TILE.WORLD_SIZE)
    shards = shards_of(staging)
    tiles = num_tiles(shards, TILE)
    sent = tiles * (TILE.WORLD_SIZE - 1)
    for index in range(first, sent, step):
        work = peers_first(index, shards, peers.rank, TILE)
        wait(flags_ptr + index, epoch, peers.watchdog_ptr, scope="gpu")
        began = trace_span(peers, PUSH_WAIT, index, began)
        if index != first:
            signal_partial_tile(staging, peers, index - step, tiles, epoch, TILE)
        source = shard_of(own_partials(staging), work)
        destination = workspace_at_owner(staging, peers, work)
        for chunk in range(TILE.BLOCK_M // ROWS):
            offsets, mask = subtile_offsets(source, work.row + chunk * ROWS, work.col, ROWS, TILE.BLOCK_N)
            # .cg: another SM wrote it, this SM's L1 may hold an older call's.
            value = tl.load(source.c_ptr + offsets, mask=mask, cache_modifier=".cg")
            tl.store(destination.c_ptr + offsets, value, mask=mask)
        began = trace_span(peers, PUSH, index, began)
    signal_last_partial(first, step, staging, peers, sent, tiles, epoch, TILE)
