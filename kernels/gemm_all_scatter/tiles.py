"""What the variants of GEMM + all-scatter share: a loop that computes tiles, and one that pushes them to the peers.

Both run over the tiles first, first + step, … of this rank's block of columns, in the same order, so that what is
computed first is sent first. `block` is that block in this rank's C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from iris_core import signal, translate, wait

from ..common.device.handshake import wait_ready
from ..common.device.trace import MULTIPLY, PUSH, PUSH_WAIT, STORE, WAIT, trace_span, trace_time
from ..common.launch.launch_metadata import Arguments, block_product, launch_metadata, peers_of
from ..common.portable.gemm import matmul_tile, num_tiles, store_tile, subtile_offsets, tile_origin

# How a computed tile is signalled inside the rank.
SIGNAL_NOTHING = tl.constexpr(0)
SIGNAL_TILE = tl.constexpr(1)  # flags[tile] = the call's number
SIGNAL_CHUNK = tl.constexpr(2)  # flags[chunk of rows] += 1, for a stream to wait on


def _sent(args: Arguments) -> int:
    return args["block"].m * args["block"].n * peers_of(args)


MULTIPLIES = launch_metadata(product=block_product)
PUSHES = launch_metadata(moved=_sent)
MULTIPLIES_AND_PUSHES = launch_metadata(product=block_product, moved=_sent)


@triton.jit
def compute_tiles(
    first,
    step,
    epoch,
    a,
    b,
    gemm,
    block,
    peers,
    flags_ptr,
    SIGNAL: tl.constexpr,
    DESTINATIONS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute tiles, store each to DESTINATIONS ranks (this one first), and signal it.

    Peers' readiness is awaited once, after the first tile, off the critical path: before the first store to a peer, or
    before the first count that lets a copy engine store there.
    """
    for tile in tl.range(first, num_tiles(block, TILE), step, num_stages=1):
        row, col = tile_origin(tile, block, TILE)
        began = trace_time(peers)
        acc = matmul_tile(a, b, gemm, block, row, col, row, TILE)
        began = trace_span(peers, MULTIPLY, tile, began)
        if DESTINATIONS > 1 or SIGNAL == SIGNAL_CHUNK:
            if tile == first:
                wait_ready(peers, epoch, WORLD_SIZE)
                began = trace_span(peers, WAIT, tile, began)
        store_tile(acc, block, row, col, peers, DESTINATIONS, WORLD_SIZE, TILE)
        trace_span(peers, STORE, tile, began)
        if SIGNAL == SIGNAL_TILE:
            # Edge: this tile's stores happen before what follows `wait` on its flag, on this GPU.
            signal(flags_ptr + tile, epoch, scope="gpu")
        elif SIGNAL == SIGNAL_CHUNK:
            tl.debug_barrier()  # the release is one thread's
            # Edge: to copies queued behind a stream's wait for the chunk's count, by engines outside the SMs.
            tl.atomic_add(flags_ptr + row // (TILE.BLOCK_M * TILE.GROUP_M), 1, sem="release", scope="sys")


@triton.jit
def push_tiles(
    first,
    step,
    epoch,
    block,
    peers,
    flags_ptr,
    WAIT_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy tiles from this rank's C to every peer's, ROWS rows at a time; with WAIT_TILES each after its flag."""
    began = trace_time(peers)
    wait_ready(peers, epoch, WORLD_SIZE)
    for tile in range(first, num_tiles(block, TILE), step):
        row, col = tile_origin(tile, block, TILE)
        if WAIT_TILES:
            wait(flags_ptr + tile, epoch, peers.watchdog_ptr, scope="gpu")
        began = trace_span(peers, PUSH_WAIT, tile, began)
        for chunk in range(TILE.BLOCK_M // ROWS):
            offsets, mask = subtile_offsets(block, row + chunk * ROWS, col, ROWS, TILE.BLOCK_N)
            # .cg: another SM wrote it, this SM's L1 may hold an older call's.
            value = tl.load(block.c_ptr + offsets, mask=mask, cache_modifier=".cg")
            for distance in tl.static_range(1, WORLD_SIZE):
                peer_ptr = translate(block.c_ptr, peers.rank, (peers.rank + distance) % WORLD_SIZE, peers.heap_bases)
                tl.store(peer_ptr + offsets, value, mask=mask)
        began = trace_span(peers, PUSH, tile, began)
