"""What the variants of all-gather + GEMM share: pushing this rank's shard of A, and multiplying shards as they arrive.

Rank r multiplies its own shard first, read where the caller has it, then those of r+1, r+2, …. So a shard is needed
first by the rank below, and is pushed in that order: to r-1, then r-2, …; all ranks push to different peers at once.
Where each peer is behind a link of its own, programs begin with different peers, and all shards come at the same time.

A pushing program counts at ``done[r]`` of a peer when its chunks of the shard are there
(../common/device/handshake.py), and nothing is reset. Copy engines set flags instead: copies.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris_core import fence_before_descriptor_loads, translate, wait
from iris_core.device.cache_key import in_cache_key

from ...common.device.handshake import count_of_chunk, signal_chunk
from ...common.device.tile_scheduler import Shards, next_index, num_tiles, own_first
from ...common.device.trace import PUSH, WAIT, trace_span, trace_time
from ...common.launch.launch_metadata import Arguments, block_product, launch_metadata, peers_of
from ...common.portable.tile_loop import compute_tiles, keep_tile


class Shard(NamedTuple):
    """This rank's (rows, columns) of A: where it is, and where it goes in every rank's gathered A.

    With it go its scales (rows, scale_columns), if there are any, to where rows of them lie end to end.
    """

    src_ptr: Any
    dst_ptr: Any
    rows: int
    columns: int
    stride_src_m: int
    stride_src_k: int
    stride_dst_m: int
    scale_src_ptr: Any = None
    scale_dst_ptr: Any = None
    scale_columns: int | None = None
    stride_scale_m: int | None = None
    stride_scale_k: int | None = None


SCALES_AT_ONCE = tl.constexpr(1024)  # that a program moves of a shard's


def _pushed(args: Arguments) -> int:
    return args["shard"].rows * args["shard"].columns * peers_of(args)


MULTIPLIES = launch_metadata(product=block_product)
PUSHES = launch_metadata(moved=_pushed)
PUSHES_AND_MULTIPLIES = launch_metadata(product=block_product, moved=_pushed)


@in_cache_key
class Arrivals(NamedTuple):
    """When a peer's shard is there: its word of those at `words_ptr`, a word a rank, is at least `expected`."""

    words_ptr: Any
    expected: int


@triton.jit
def chunk_offsets(shard, chunk, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return where a chunk of the shard lies, where it goes, as offsets (ROWS, COLS), and which of it there is."""
    chunks_k = tl.cdiv(shard.columns, COLS)
    rows = (chunk // chunks_k) * ROWS + tl.arange(0, ROWS)
    columns = (chunk % chunks_k) * COLS + tl.arange(0, COLS)
    mask = (rows < shard.rows)[:, None] & (columns < shard.columns)[None, :]
    src = rows.to(tl.int64)[:, None] * shard.stride_src_m + columns.to(tl.int64)[None, :] * shard.stride_src_k
    dst = rows.to(tl.int64)[:, None] * shard.stride_dst_m + columns[None, :]
    return src, dst, mask


@triton.jit
def num_chunks_of(shard, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the number of chunks of the shard."""
    return tl.cdiv(shard.rows, ROWS) * tl.cdiv(shard.columns, COLS)


@triton.jit
def scale_offsets(shard, chunk):
    """Return where a chunk of the shard's scales lies, where it goes, as offsets, and which of it there is."""
    dst = chunk * SCALES_AT_ONCE + tl.arange(0, SCALES_AT_ONCE)
    row, column = dst // shard.scale_columns, dst % shard.scale_columns
    return row * shard.stride_scale_m + column * shard.stride_scale_k, dst, row < shard.rows


@triton.jit
def num_scale_chunks(shard):
    """Return the number of chunks of the shard's scales."""
    return tl.cdiv(shard.rows * shard.scale_columns, SCALES_AT_ONCE)


@triton.jit
def copy_shard(first, step, shard, dst_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Copy chunks first, first + step, … of the shard to a rank's gathered A."""
    for chunk in range(first, num_chunks_of(shard, ROWS, COLS), step):
        src, dst, mask = chunk_offsets(shard, chunk, ROWS, COLS)
        tl.store(dst_ptr + dst, tl.load(shard.src_ptr + src, mask=mask), mask=mask)


@triton.jit
def copy_scales(first, step, shard, dst_ptr):
    """Copy chunks first, first + step, … of the shard's scales to a rank's."""
    for chunk in range(first, num_scale_chunks(shard), step):
        src, dst, mask = scale_offsets(shard, chunk)
        tl.store(dst_ptr + dst, tl.load(shard.scale_src_ptr + src, mask=mask), mask=mask)


@triton.jit
def push_scales(first, step, shard, peer, peers):
    """Copy chunks of the shard's scales, if there are any, to a peer; the signal of the shard is theirs, too."""
    if shard.scale_src_ptr is not None:
        copy_scales(first, step, shard, translate(shard.scale_dst_ptr, peers.rank, peer, peers.heap_bases))


@triton.jit
def push_shard(
    first,
    step,
    shard,
    peers,
    SIGNAL: tl.constexpr,
    FULLY_CONNECTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """Copy chunks first, first + step, … of the shard to every peer, one peer after the other; SIGNAL each to it.

    With FULLY_CONNECTED programs begin with different peers, so that all links carry some of it. Its scales go
    before the signal.
    """
    for distance in tl.static_range(1, WORLD_SIZE):
        if FULLY_CONNECTED:
            peer = (peers.rank + WORLD_SIZE - 1 - (first + distance - 1) % (WORLD_SIZE - 1)) % WORLD_SIZE
        else:
            peer = (peers.rank + WORLD_SIZE - distance) % WORLD_SIZE
        began = trace_time(peers)
        peer_ptr = translate(shard.dst_ptr, peers.rank, peer, peers.heap_bases)
        copy_shard(first, step, shard, peer_ptr, ROWS, COLS)
        push_scales(first, step, shard, peer, peers)
        if SIGNAL:
            signal_chunk(peers, peer, count_of_chunk(first == 0, step), WORLD_SIZE)
        trace_span(peers, PUSH, peer, began)


@triton.jit
def multiply_shards(
    first, step, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, arrivals, TILE: tl.constexpr
):
    """Compute tiles first, first + step, … of this rank's columns of C, shard after shard.

    A peer's shard is awaited by `arrivals`, unless that is None.
    """
    WORLD_SIZE: tl.constexpr = TILE.WORLD_SIZE
    own = Shards(shard_rows, block.n, block.m, 0)
    tiles = num_tiles(own, TILE)
    own_tiles = (first, step, tiles)
    compute_tiles(own_tiles, a, b, gemm, own, block, peers, None, own_first, keep_tile, TILE)
    shards = Shards(shard_rows, block.n, block.m, shard_rows)
    peers_tiles = (next_index(first, step, tiles), step, tiles * WORLD_SIZE)
    compute_tiles(
        peers_tiles,
        gathered,
        b,
        gathered_gemm,
        shards,
        block,
        peers,
        None,
        own_first,
        keep_tile,
        TILE,
        arrivals,
        await_shard,
    )
    if arrivals is not None:
        if (tiles == 0) & (first == 0):  # a rank without columns: its gathered A must be whole all the same
            for distance in tl.static_range(1, WORLD_SIZE):
                wait(
                    arrivals.words_ptr + (peers.rank + distance) % WORLD_SIZE,
                    arrivals.expected,
                    peers.watchdog_ptr,
                )


@triton.jit
def await_shard(arrivals, work, peers):
    """Wait until the shard with a tile's rows of A has come: a gate of compute_tiles."""
    if arrivals is not None:
        began = trace_time(peers)
        wait(arrivals.words_ptr + work.owner, arrivals.expected, peers.watchdog_ptr)
        fence_before_descriptor_loads()
        trace_span(peers, WAIT, work.index, began)
