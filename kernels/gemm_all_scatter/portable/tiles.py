"""What the portable variants of GEMM + all-scatter share: a loop that pushes tiles to the peers.

A rank's tiles are those of its block of columns, `block` in its own C. They are computed and pushed in the same order,
that of `row_grouped`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from iris_core import translate, wait

from ...common.device.handshake import wait_ready
from ...common.device.tile_scheduler import num_tiles, tile_origin
from ...common.device.trace import PUSH, PUSH_WAIT, trace_span, trace_time
from ...common.launch.launch_metadata import Arguments, block_product, launch_metadata, peers_of
from ...common.portable.gemm import subtile_offsets


def _sent(args: Arguments) -> int:
    return args["block"].m * args["block"].n * peers_of(args)


MULTIPLIES = launch_metadata(product=block_product)
PUSHES = launch_metadata(moved=_sent)
MULTIPLIES_AND_PUSHES = launch_metadata(product=block_product, moved=_sent)


@triton.jit
def push_tiles(
    first, step, epoch, block, peers, flags_ptr, WAIT_TILES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Copy tiles from this rank's C to every peer's, ROWS rows at a time; with WAIT_TILES wait for each tile's flag."""
    WORLD_SIZE: tl.constexpr = TILE.WORLD_SIZE
    began = trace_time(peers)
    wait_ready(peers, epoch, WORLD_SIZE)
    for tile in range(first, num_tiles(block, TILE), step):
        row, col = tile_origin(tile, block, TILE)
        if WAIT_TILES:
            wait(flags_ptr + tile, epoch, peers.watchdog_ptr, scope="gpu")
        began = trace_span(peers, PUSH_WAIT, tile, began)
        for chunk in range(TILE.BLOCK_M // ROWS):
            offsets, mask = subtile_offsets(block, row + chunk * ROWS, col, ROWS, TILE.BLOCK_N)
            # .cg: another SM wrote the tile; this SM's L1 may still hold the values of an older call.
            value = tl.load(block.c_ptr + offsets, mask=mask, cache_modifier=".cg")
            for distance in tl.static_range(1, WORLD_SIZE):
                peer_ptr = translate(block.c_ptr, peers.rank, (peers.rank + distance) % WORLD_SIZE, peers.heap_bases)
                tl.store(peer_ptr + offsets, value, mask=mask)
        began = trace_span(peers, PUSH, tile, began)
