"""The persistent tile loop of the portable main loop: what a program does with its tiles, one after the other.

A fused GEMM is a tile scheduler, a gate, the main loop, an epilogue and a transport. The main loop is `matmul_steps`;
the loop over tiles takes the rest as three jit functions, each with a bundle of what it reads:

| function | called as | does |
|---|---|---|
| SCHEDULER | ``(index, tiled, rank, TILE)`` | returns an index's work tile (../device/tile_scheduler.py) |
| GATE | ``(gate, work, peers)`` | waits for a tile's rows of A, and their scales; None for none |
| FINISH | ``(acc, target, work, peers, epoch, began, TILE)`` | stores a tile's sum, and signals it |

`began` is when the sum was complete, for the trace.
"""

from __future__ import annotations

import triton
import triton.language as tl

from iris_core import signal

from ..device.handshake import wait_ready
from ..device.trace import MULTIPLY, STORE, WAIT, trace_span, trace_time
from .gemm import matmul_steps, shard_of, store_tile


@triton.jit
def with_numbers(bundle):
    """Return a bundle with numbers in the place of constants, which arguments are that are 1; it may go into another.

    In a loop Triton 3.6 takes the constants of a bundle within a bundle for None.
    """
    return bundle


@triton.jit
def compute_tiles(
    indices,
    a,
    b,
    gemm,
    tiled,
    target,
    peers,
    epoch,
    SCHEDULER: tl.constexpr,
    FINISH: tl.constexpr,
    TILE: tl.constexpr,
    gate=None,
    GATE: tl.constexpr = None,
):
    """Compute a program's tiles, those of the indices first, first + step, … below `stop`; `indices` has the three."""
    first, step, stop = indices
    # num_stages=1: the main loop inside is what Triton should pipeline. Where k is one constant step it vanishes, and
    # this loop would be pipelined in its place, its loads moved above its waits (Triton 3.6).
    for index in tl.range(first, stop, step, num_stages=1):
        work = SCHEDULER(index, tiled, peers.rank, TILE)
        if GATE is not None:
            GATE(gate, work, peers)
        began = trace_time(peers)
        acc = matmul_steps(a, gemm.a_scale_ptr, b, gemm, work, work.row, work.col, work.a_row, 0, gemm.k, TILE)
        began = trace_span(peers, MULTIPLY, work.index, began)
        FINISH(acc, target, work, peers, epoch, began, TILE)


@triton.jit
def keep_tile(acc, block, work, peers, epoch, began, TILE: tl.constexpr):
    """Store a tile in this rank's memory, in its owner's rows of a block."""
    store_tile(acc, shard_of(block, work), work.row, work.col, peers, 1, TILE)
    trace_span(peers, STORE, work.index, began)


@triton.jit
def keep_and_signal(acc, target, work, peers, epoch, began, TILE: tl.constexpr):
    """Keep a tile, and set its flag to the call's number, for other programs; `target`: (block, flags).

    Edge: this tile's stores happen before what follows `wait` on its flag, on this GPU.
    """
    block, flags_ptr = target
    keep_tile(acc, block, work, peers, epoch, began, TILE)
    signal(flags_ptr + work.index, epoch, scope="gpu")


@triton.jit
def keep_and_count(acc, target, work, peers, epoch, began, TILE: tl.constexpr):
    """Keep a tile, and count it in its chunk, GROUP_M rows of tiles, for a stream that waits for all of them.

    `target`: (block, counts, chunks of a shard, first index). Before its first count, which may let a copy engine store
    to peers, a program waits until they are ready.
    Edge: to copies queued behind a stream's wait for the chunk's count, by engines outside the SMs.
    """
    block, counts_ptr, chunks, first = target
    began = wait_ready_once(first, work, peers, epoch, began, TILE.WORLD_SIZE)
    keep_tile(acc, block, work, peers, epoch, began, TILE)
    tl.debug_barrier()  # the release is one thread's
    chunk = work.turn * chunks + work.row // (TILE.BLOCK_M * TILE.GROUP_M)
    tl.atomic_add(counts_ptr + chunk, 1, sem="release", scope="sys")


@triton.jit
def wait_ready_once(first, work, peers, epoch, began, WORLD_SIZE: tl.constexpr):
    """After the tile of a program's `first` index, off the critical path, wait until all peers are ready."""
    if work.index == first:
        wait_ready(peers, epoch, WORLD_SIZE)
        began = trace_span(peers, WAIT, work.index, began)
    return began
