"""The persistent tile loop of the portable main loop: what a program does with its tiles, one after the other.

A fused GEMM is a tile scheduler, a gate, the main loop, an epilogue and a transport. The main loop is `matmul_steps`;
the loop over tiles takes the rest as three jit functions, each with a bundle of what it reads:

| function | called as | does |
|---|---|---|
| SCHEDULER | ``(index, tiled, rank, WORLD_SIZE, TILE)`` | returns an index's work tile (../device/tile_scheduler.py) |
| GATE | ``(a, gate, work, peers, epoch)`` | waits for the rows of A that a tile needs; returns where A is |
| FINISH | ``(acc, target, work, peers, epoch, began, WORLD_SIZE, TILE)`` | stores a tile's sum, and signals it |

`began` is when the sum was complete, for the trace.
"""

from __future__ import annotations

import triton
import triton.language as tl

from iris_core import signal

from ..device.trace import MULTIPLY, trace_span, trace_time
from .gemm import matmul_steps


@triton.jit
def no_gate(a, gate, work, peers, epoch):
    """All of A is there, at `a`."""
    return a


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
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    gate=None,
    GATE: tl.constexpr = no_gate,
):
    """Compute a program's tiles, those of the indices first, first + step, … below `stop`; `indices` has the three."""
    first, step, stop = indices
    # num_stages=1: the main loop inside is what Triton should pipeline. Where k is one constant step it vanishes, and
    # this loop would be pipelined in its place, its loads moved above its waits (Triton 3.6).
    for index in tl.range(first, stop, step, num_stages=1):
        work = SCHEDULER(index, tiled, peers.rank, WORLD_SIZE, TILE)
        here = GATE(a, gate, work, peers, epoch)
        began = trace_time(peers)
        acc = matmul_steps(here, b, gemm, work, work.row, work.col, work.a_row, 0, gemm.k, TILE)
        began = trace_span(peers, MULTIPLY, index, began)
        FINISH(acc, target, work, peers, epoch, began, WORLD_SIZE, TILE)


@triton.jit
def signal_tile(flags_ptr, index, epoch):
    """Signal inside the rank that a tile is computed: its flag is the call's number.

    Edge: this tile's stores happen before what follows `wait` on its flag, on this GPU.
    """
    signal(flags_ptr + index, epoch, scope="gpu")


@triton.jit
def count_tile(counts_ptr, chunk):
    """Count a computed tile of a chunk of rows, for a stream to wait on.

    Edge: to copies queued behind a stream's wait for the chunk's count, by engines outside the SMs.
    """
    tl.debug_barrier()  # the release is one thread's
    tl.atomic_add(counts_ptr + chunk, 1, sem="release", scope="sys")
