"""What families that sum over ranks share: partial tiles of C are computed, sent to their owner, and summed there.

C is cut into shards of rows, one a rank, and a rank computes a partial sum of every tile of every shard. It starts with
the shard of rank+1 and ends with its own, so that the peers' partials of its own have had most of the time to arrive.

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

from ..device.handshake import COUNTS_OF_A_CALL, wait_chunks, wait_ready
from ..device.tile_scheduler import num_tiles, tile_origin
from ..device.trace import MULTIPLY, PUSH, PUSH_WAIT, STORE, SUM, WAIT, trace_span, trace_time
from ..launch.launch_metadata import Arguments, launch_metadata, peers_of, size_of_shard
from .gemm import matmul_tile, store_subtile, store_tile, subtile_offsets, unfinished_block

# How a computed partial tile is signalled inside the rank.
SIGNAL_TILE = tl.constexpr(0)  # flags[index] = the call's number
SIGNAL_CHUNK = tl.constexpr(1)  # flags[chunk] += 1, for a stream to wait on; a chunk is GROUP_M rows of tiles

# The peers' partials are awaited by a flag a tile and peer, or by so many chunks a shard, counted in their order.
WAIT_TILES = tl.constexpr(0)


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
def largest_shard(staging):
    """Return a block as large as any rank's shard, by which all ranks' tiles are numbered."""
    return _shard_of(staging, staging.workspace_ptr, 0, 0)


@triton.jit
def shard_tiles(staging, TILE: tl.constexpr):
    """Return the number of tiles of a shard; the same for all, what reaches past the end of a smaller one is masked."""
    return num_tiles(largest_shard(staging), TILE)


@triton.jit
def _shard_of(staging, base_ptr, index, shard):
    """Return one rank's partial as a block, its rows those of a shard."""
    offset = tl.cast(index, tl.int64) * staging.shard_rows * staging.n
    start = tl.minimum(shard * staging.shard_rows, staging.m)
    rows = tl.minimum(staging.shard_rows, staging.m - start)
    return unfinished_block(base_ptr + offset, rows, staging.n, staging.n)


@triton.jit
def own_partial(staging, owner):
    """Return where this rank keeps its partial of `owner`'s shard until it is sent."""
    return _shard_of(staging, staging.partial_ptr, owner, owner)


@triton.jit
def workspace_at_owner(staging, peers, owner):
    """Return this rank's partial in `owner`'s staging buffer."""
    workspace_ptr = translate(staging.workspace_ptr, peers.rank, owner, peers.heap_bases)
    return _shard_of(staging, workspace_ptr, peers.rank, owner)


@triton.jit
def owner_of(peers, index, tiles, WORLD_SIZE: tl.constexpr):
    """Return whose tile the index in the order of sending is: first all of rank+1's, then rank+2's, …."""
    return (peers.rank + 1 + index // tiles) % WORLD_SIZE


@triton.jit
def signal_partial(staging, peers, index, tiles, epoch, WORLD_SIZE: tl.constexpr):
    """Signal to a tile's owner that this rank's partial of it is there.

    Edge: this program's stores happen before what follows the owner's wait for the flag.
    """
    owner = owner_of(peers, index, tiles, WORLD_SIZE)
    flags_ptr = translate(staging.flags_ptr, peers.rank, owner, peers.heap_bases)
    signal(flags_ptr + peers.rank * tiles + index % tiles, epoch)


@triton.jit
def signal_last_partial(first, step, staging, peers, sent, tiles, epoch, WORLD_SIZE: tl.constexpr):
    """Signal the last of a program's partial tiles first, first + step, … before `sent`, if it had any."""
    if first < sent:
        index = first + (sent - 1 - first) // step * step
        signal_partial(staging, peers, index, tiles, epoch, WORLD_SIZE)


@triton.jit
def partial_tile(a, b, gemm, staging, shard, tile, TILE: tl.constexpr):
    """Return this rank's partial of a tile of a shard in fp32, and the tile's row and column in the shard."""
    block = _shard_of(staging, staging.workspace_ptr, 0, shard)
    row, col = tile_origin(tile, largest_shard(staging), TILE)
    return matmul_tile(a, b, gemm, block, row, col, shard * staging.shard_rows + row, TILE), row, col


@triton.jit
def sum_tile(
    acc,
    out,
    staging,
    peers,
    row,
    col,
    tile,
    tiles,
    epoch,
    CHUNKS: tl.constexpr,
    DESTINATIONS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the peers' partials of a tile of this rank's shard, when they have come, and store the sum."""
    index = tiles * (WORLD_SIZE - 1) + tile
    began = trace_time(peers)
    for distance in tl.static_range(1, WORLD_SIZE):
        peer = (peers.rank + distance) % WORLD_SIZE
        if CHUNKS == WAIT_TILES:
            wait(staging.flags_ptr + peer * tiles + tile, epoch, peers.watchdog_ptr)
        else:
            chunk = row // (TILE.BLOCK_M * TILE.GROUP_M)
            # The last one counts for all that is missing to a call's counts.
            count = tl.where(chunk == CHUNKS - 1, COUNTS_OF_A_CALL, chunk + 1)
            wait_chunks(peers, peer, (epoch - 1) * COUNTS_OF_A_CALL + count, WORLD_SIZE)
    began = trace_span(peers, WAIT, index, began)
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    if TILE.SUBTILES == 1:
        _sum_subtile(acc, out, staging, peers, row, col, DESTINATIONS, WORLD_SIZE, BLOCK_M, BLOCK_N, TILE)
    else:
        half: tl.constexpr = BLOCK_N // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, half)), (0, 2, 1)))
        _sum_subtile(left, out, staging, peers, row, col, DESTINATIONS, WORLD_SIZE, BLOCK_M, half, TILE)
        _sum_subtile(right, out, staging, peers, row, col + half, DESTINATIONS, WORLD_SIZE, BLOCK_M, half, TILE)
    trace_span(peers, SUM, index, began)


@triton.jit
def _sum_subtile(
    acc,
    out,
    staging,
    peers,
    row,
    col,
    DESTINATIONS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,
):
    offsets, mask = subtile_offsets(out, row, col, ROWS, COLS)
    # Not unrolled: one peer's partial in registers at a time.
    for distance in range(1, WORLD_SIZE):
        partial = _shard_of(staging, staging.workspace_ptr, (peers.rank + distance) % WORLD_SIZE, peers.rank)
        # .cg: the peer wrote it past this SM's L1, which may hold an older call's.
        acc += tl.load(partial.c_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    store_subtile(acc, out, row, col, peers, DESTINATIONS, WORLD_SIZE, ROWS, COLS, TILE)


@triton.jit
def push_partial_tiles(
    first,
    step,
    epoch,
    staging,
    peers,
    flags_ptr,
    ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy partial tiles first, first + step, … to their owners, ROWS rows at a time, and signal them.

    In the order in which they are computed, each after its flag. A tile is signalled when the next one is there to be
    sent: the release then finds its stores arrived, and does not wait for them.
    """
    began = trace_time(peers)
    wait_ready(peers, epoch, WORLD_SIZE)
    tiles = shard_tiles(staging, TILE)
    sent = tiles * (WORLD_SIZE - 1)
    for index in range(first, sent, step):
        owner = owner_of(peers, index, tiles, WORLD_SIZE)
        wait(flags_ptr + index, epoch, peers.watchdog_ptr, scope="gpu")
        began = trace_span(peers, PUSH_WAIT, index, began)
        if index != first:
            signal_partial(staging, peers, index - step, tiles, epoch, WORLD_SIZE)
        source = own_partial(staging, owner)
        destination = workspace_at_owner(staging, peers, owner)
        row, col = tile_origin(index % tiles, largest_shard(staging), TILE)
        for chunk in range(TILE.BLOCK_M // ROWS):
            offsets, mask = subtile_offsets(source, row + chunk * ROWS, col, ROWS, TILE.BLOCK_N)
            # .cg: another SM wrote it, this SM's L1 may hold an older call's.
            value = tl.load(source.c_ptr + offsets, mask=mask, cache_modifier=".cg")
            tl.store(destination.c_ptr + offsets, value, mask=mask)
        began = trace_span(peers, PUSH, index, began)
    signal_last_partial(first, step, staging, peers, sent, tiles, epoch, WORLD_SIZE)


@triton.jit
def compute_partial_tiles(
    first,
    step,
    epoch,
    a,
    b,
    gemm,
    staging,
    peers,
    flags_ptr,
    SIGNAL: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute tiles first, first + step, … of the peers' shards into this rank's memory, and signal each."""
    tiles = shard_tiles(staging, TILE)
    for index in tl.range(first, tiles * (WORLD_SIZE - 1), step, num_stages=1):
        owner = owner_of(peers, index, tiles, WORLD_SIZE)
        began = trace_time(peers)
        acc, row, col = partial_tile(a, b, gemm, staging, owner, index % tiles, TILE)
        began = trace_span(peers, MULTIPLY, index, began)
        if SIGNAL == SIGNAL_CHUNK:
            if index == first:  # before the first count that lets a copy engine store there
                wait_ready(peers, epoch, WORLD_SIZE)
                began = trace_span(peers, WAIT, index, began)
        store_tile(acc, own_partial(staging, owner), row, col, peers, 1, WORLD_SIZE, TILE)
        trace_span(peers, STORE, index, began)
        if SIGNAL == SIGNAL_TILE:
            # Edge: this tile's stores happen before what follows `wait` on its flag, on this GPU.
            signal(flags_ptr + index, epoch, scope="gpu")
        elif SIGNAL == SIGNAL_CHUNK:
            tl.debug_barrier()  # the release is one thread's
            chunks = tl.cdiv(staging.shard_rows, TILE.BLOCK_M * TILE.GROUP_M)
            chunk = index // tiles * chunks + row // (TILE.BLOCK_M * TILE.GROUP_M)
            # Edge: to copies queued behind a stream's wait for the chunk's count, by engines outside the SMs.
            tl.atomic_add(flags_ptr + chunk, 1, sem="release", scope="sys")


@triton.jit
def sum_own_tiles(
    first,
    step,
    epoch,
    a,
    b,
    gemm,
    out,
    staging,
    peers,
    CHUNKS: tl.constexpr,
    DESTINATIONS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute tiles first, first + step, … of this rank's shard, add the peers' partials, store the sums.

    Peers' readiness needs no wait, though sums may be stored there: each tile awaits a partial of every peer's.
    """
    tiles = shard_tiles(staging, TILE)
    for tile in tl.range(first, tiles, step, num_stages=1):
        index = tiles * (WORLD_SIZE - 1) + tile
        began = trace_time(peers)
        acc, row, col = partial_tile(a, b, gemm, staging, peers.rank, tile, TILE)
        trace_span(peers, MULTIPLY, index, began)
        sum_tile(acc, out, staging, peers, row, col, tile, tiles, epoch, CHUNKS, DESTINATIONS, WORLD_SIZE, TILE)


@triton.jit
def resumed(first, step, count):
    """Return where a program that took indices first, first + step, … goes on after `count`, from there."""
    return first + tl.cdiv(tl.maximum(count - first, 0), step) * step - count
