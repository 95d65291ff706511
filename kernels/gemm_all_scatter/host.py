"""What the variants of GEMM + all-scatter share: C, whole on every rank's heap, and the loop that pushes tiles.

A rank's tiles are those of its block of columns, `block` in its own C. They are computed and pushed in the same order,
that of `row_grouped`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from iris_core import translate, wait

from ..common.call import Call
from ..common.device.arguments import Block
from ..common.device.handshake import wait_ready
from ..common.device.tile_scheduler import num_tiles, tile_origin
from ..common.device.trace import PUSH, PUSH_WAIT, trace_span, trace_time
from ..common.launch.launch_metadata import Arguments, block_product, launch_metadata, peers_of
from ..common.portable.gemm import subtile_offsets
from ..common.workspace import Buffer, local_flags
from .problem import GemmAllScatterProblem

FAMILY = "gemm_all_scatter"


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


def workspace(call: Call[GemmAllScatterProblem]) -> dict[str, Buffer]:
    """Return the buffer of C."""
    problem = call.problem
    return {"output": Buffer((problem.m, problem.n), problem.out_dtype, is_symmetric=True)}


def workspace_with_flags(call: Call[GemmAllScatterProblem]) -> dict[str, Buffer]:
    """Return that buffer, and the tiles' flags."""
    return {**workspace(call), "flags": local_flags(own_tiles(call), "tile")}


def outputs(call: Call[GemmAllScatterProblem]) -> tuple[torch.Tensor]:
    """Return C."""
    return (call.memory["output"],)


def own_tiles(call: Call[GemmAllScatterProblem]) -> int:
    """Return the number of tiles of this rank's block of columns."""
    return call.num_tiles(call.problem.m, call.problem.b_shape(call.rank)[1])


def block_of(call: Call[GemmAllScatterProblem]) -> Block:
    """Return the columns of C that this rank computes."""
    (output,), (start, stop) = outputs(call), call.problem.columns(call.rank)
    # A rank without columns would have an empty tensor here, whose address torch gives as null.
    corner = output[:, start:stop] if stop > start else output
    return Block(corner, call.problem.m, stop - start, call.problem.n, call.epilogue())


def compute_arguments(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    """Return what a kernel that computes takes."""
    return {**call.main_loop(a, b), **_where(call)}


def push_arguments(call: Call[GemmAllScatterProblem]) -> dict[str, Any]:
    """Return what a kernel that only pushes takes."""
    return {"TILE": call.tile(), "ROWS": call.config.comm_rows, **_where(call)}


def _where(call: Call[GemmAllScatterProblem]) -> dict[str, Any]:
    return {"block": block_of(call), "peers": call.peers()}
