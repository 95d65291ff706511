"""Stream-K, a schedule: whole tiles, one per program, then tiles that programs split along k.

Every program computes as many whole tiles as the others. What is left, less than a tile per program, is one long row of
k steps, column of tiles after column of tiles. The programs that split them take equal runs of it. A run ends one tile
and begins the next, or lies within one. As many programs as a column has tiles take the same run, each of its own tile:
they read the same part of B at the same time, once from memory. (A row of single tiles had B read four times for M =
512.)

The program that has the first steps of a tile fixes it up: it waits for the others, adds their partial sums to its own
in the order of k, so that the bits are the same in every run, and goes on with the tile. The others store their
partials in a workspace on their own GPU, and signal with the number of the call. A program stores one partial a call at
most, that of the tile in which its run begins, and it does so before it waits for another's.

No program should wait long: runs that go from one tile to another are shorter than others by what the change takes, and
the program that fixes a tile up, and stores no partial, has more steps by what storing one takes (`StreamK.head`).

Tiles are taken in ascending order by every program of every rank, and all programs are resident: a tile may wait for
the same tile of a peer, as the earliest that is waited for is always under way. All ranks have the same tiles, those of
the rank with the most columns: what a smaller one lacks is masked.

A short kernel of this loop is launched before the previous one in the stream is done, where GPUs can do that: its
programs are there when the last tile of that one is. It begins with `gdc_wait`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris_core import gdc_launch_dependents, signal, wait_each

from ..config import MOST_SPLITS
from ..device.arguments import Block
from ..device.tile_scheduler import TileSplit, num_tiles, tile_origin
from ..device.trace import MULTIPLY, STORE, SUM, WAIT, trace_span, trace_time
from .gemm import matmul_steps, subtile

NONE = tl.constexpr(0)  # no tile is split
UNEVEN = tl.constexpr(-1)  # a run may end one tile and begin the next
MOST_TILE_SPLITS = tl.constexpr(2 * MOST_SPLITS)  # of a tile: so many in the mean, and one more at each end
LARGE = tl.constexpr(128 * 128)  # elements of a tile of whose partials one at a time is loaded


class StreamK(NamedTuple):
    """How programs split tiles, `height` of them a column of tiles, and their workspace, on this rank.

    `workspace_ptr` points at fp32 (split_programs, BLOCK_M, BLOCK_N), the partial that a program stored; `flags_ptr` at
    (split_programs,) int64, the call in which it did. The first step of a tile counts for `head` more when steps are
    divided, or for fewer.
    """

    workspace_ptr: Any
    flags_ptr: Any
    split_programs: int
    height: int
    head: int


class Halves(NamedTuple):
    """How many elements of data, and how many flags, lie between the two halves that calls use alternately."""

    data: int
    flags: int


@triton.jit
def compute_stream_k(
    a,
    a_scale_ptr,
    b,
    gemm,
    block,
    widest,
    a_row,
    stream_k,
    target,
    peers,
    epoch,
    FINISH: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute this program's tiles, and its splits of tiles, and finish those that it fixes up.

    SPLITS says how many programs split each of the last tiles: NONE, or UNEVEN, or so many.

    `block` is what this rank has of the output, `widest` what the rank with the most columns has; row 0 of them belongs
    to row `a_row` of A, whose scales are at `a_scale_ptr`. ``FINISH(acc, target, peers, row, col, tile, tiles, epoch,
    TILE)`` takes a tile, or with two SUBTILES its halves.
    """
    tiles = num_tiles(widest, TILE)
    steps = tl.maximum(tl.cdiv(gemm.k, TILE.BLOCK_K), 1)
    waves = _num_waves(tiles, steps, stream_k, HAS_WHOLE, SPLITS)
    for wave in tl.range(0, waves, num_stages=1):
        work = _tile_split(wave, tiles, steps, stream_k, HAS_WHOLE, SPLITS)
        row, col = tile_origin(work.index, widest, TILE)
        began = trace_time(peers)
        stop_k = tl.minimum(work.stop * TILE.BLOCK_K, gemm.k)
        first_k = work.start * TILE.BLOCK_K
        acc = matmul_steps(a, a_scale_ptr, b, gemm, block, row, col, a_row + row, first_k, stop_k, TILE)
        if wave + 1 == waves:
            gdc_launch_dependents()  # its programs may take free SMs
        trace_span(peers, MULTIPLY, work.index, began)
        if SPLITS == NONE:
            FINISH(acc, target, peers, row, col, work.index, tiles, epoch, TILE)
        elif work.split > 0:
            store_partial(acc, stream_k, work, peers, epoch, TILE)
        else:
            total = fix_up(acc, stream_k, work, peers, epoch, TILE)
            FINISH(total, target, peers, row, col, work.index, tiles, epoch, TILE)


@triton.jit
def _whole_waves(tiles, HAS_WHOLE: tl.constexpr):
    """Return how many whole tiles every program has where others are split."""
    if HAS_WHOLE:
        return tiles // tl.num_programs(0)
    else:
        return tiles * 0


@triton.jit
def _num_waves(tiles, steps, stream_k, HAS_WHOLE: tl.constexpr, SPLITS: tl.constexpr):
    """Return how many tiles and splits of tiles this program has."""
    pid = tl.program_id(0)
    if SPLITS == NONE:
        return tl.cdiv(tiles - pid, tl.num_programs(0))
    elif SPLITS != UNEVEN:
        return _whole_waves(tiles, HAS_WHOLE) + tl.where(pid < stream_k.split_programs, 1, 0)
    else:
        whole = _whole_waves(tiles, HAS_WHOLE)
        start, stop = _run_of_steps(tiles - whole * tl.num_programs(0), steps, stream_k)
        counted = steps + stream_k.head
        last = (stop - 1 - tl.maximum(stream_k.head, 0)) // counted  # of whose steps some are this program's
        return whole + tl.where(pid < stream_k.split_programs, last - start // counted + 1, 0)


@triton.jit
def _run_of_steps(split_tiles, steps, stream_k):
    """Return the first of this program's steps of all columns of split tiles, and the one after its last, as counted.

    In 32 bits, as divisions of 64 take long and nothing hides them; the host sees to it that they suffice.
    """
    column_steps = split_tiles // stream_k.height * (steps + stream_k.head)
    runs = stream_k.split_programs // stream_k.height
    run = tl.program_id(0) // stream_k.height
    return run * column_steps // runs, (run + 1) * column_steps // runs


@triton.jit
def _run_with(step, split_tiles, steps, stream_k):
    """Return which run a step of all columns of split tiles, as counted, is in."""
    column_steps = split_tiles // stream_k.height * (steps + stream_k.head)
    runs = stream_k.split_programs // stream_k.height
    return ((step + 1) * runs - 1) // column_steps


@triton.jit
def _tile_split(wave, tiles, steps, stream_k, HAS_WHOLE: tl.constexpr, SPLITS: tl.constexpr):
    """Return what this program computes in a wave."""
    pid = tl.program_id(0)
    if SPLITS == NONE:
        none = wave * 0
        return TileSplit(pid + wave * tl.num_programs(0), none, steps, none, none + 1)
    else:
        whole = _whole_waves(tiles, HAS_WHOLE)
        first_split = whole * tl.num_programs(0)
        run = pid // stream_k.height
        counted = steps + stream_k.head
        if SPLITS == UNEVEN:
            start, stop = _run_of_steps(tiles - first_split, steps, stream_k)
            column = start // counted + wave - whole
            begin = column * counted + stream_k.head  # where the tile's own steps begin
            first_run = _run_with(begin - tl.minimum(stream_k.head, 0), tiles - first_split, steps, stream_k)
            splits = _run_with(begin + steps - 1, tiles - first_split, steps, stream_k) - first_run + 1
            split = run - first_run
            first = start - begin
            stop = tl.minimum(stop - begin, steps)
        else:
            column = run // SPLITS
            splits = wave * 0 + SPLITS
            split = run % SPLITS
            first = split * counted // SPLITS - stream_k.head
            stop = (split + 1) * counted // SPLITS - stream_k.head
        first = tl.where(split == 0, 0, first)
        split_tile = column * stream_k.height + pid % stream_k.height
        if HAS_WHOLE:
            is_whole = wave < whole
            tile = tl.where(is_whole, pid + wave * tl.num_programs(0), first_split + split_tile)
            first = tl.where(is_whole, 0, first)
            stop = tl.where(is_whole, steps, stop)
            split = tl.where(is_whole, 0, split)
            splits = tl.where(is_whole, 1, splits)
        else:
            tile = split_tile
        return TileSplit(tile, first, stop, split, splits)


@triton.jit
def store_partial(acc, stream_k, work, peers, epoch, TILE: tl.constexpr):
    """Store a program's partial sum for the program that fixes the tile up.

    Edge: this program's stores, and its reads of the call, happen before what follows the other's `fix_up`.
    """
    began = trace_time(peers)
    program = tl.program_id(0)
    tl.store(stream_k.workspace_ptr + _partial_offsets(program, TILE.BLOCK_N, TILE), acc)
    signal(stream_k.flags_ptr + program, epoch, scope="gpu")
    trace_span(peers, STORE, work.index, began)


@triton.jit
def fix_up(acc, stream_k, work, peers, epoch, TILE: tl.constexpr):
    """Return a tile's sum over all its splits, when they are there, in the order of k; `acc` is the first of them."""
    began = trace_time(peers)
    if work.splits > 1:
        others = tl.arange(0, MOST_TILE_SPLITS) + 1
        flag_ptrs = stream_k.flags_ptr + tl.program_id(0) + others * stream_k.height
        wait_each(flag_ptrs, epoch, others < work.splits, peers.watchdog_ptr)
    began = trace_span(peers, WAIT, work.index, began)
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    if TILE.SUBTILES == 1:
        ELEMENTS: tl.constexpr = TILE.BLOCK_M * BLOCK_N
        AT_ONCE: tl.constexpr = 4 if ELEMENTS < LARGE // 2 else 2 if ELEMENTS < LARGE else 1
        total = acc
        for split in tl.range(1, work.splits, AT_ONCE, num_stages=1):
            for ahead in tl.static_range(AT_ONCE):  # their loads do not wait for each other
                total += _load_partial(stream_k, work, split + ahead, 0, BLOCK_N, TILE)
    else:  # in halves: a second sum of such a tile would not fit the registers
        left, right = subtile(acc, 0, TILE), subtile(acc, 1, TILE)
        for split in tl.range(1, work.splits, num_stages=1):
            left += _load_partial(stream_k, work, split, 0, BLOCK_N // 2, TILE)
        for split in tl.range(1, work.splits, num_stages=1):
            right += _load_partial(stream_k, work, split, BLOCK_N // 2, BLOCK_N // 2, TILE)
        total = (left, right)
    trace_span(peers, SUM, work.index, began)
    return total


@triton.jit
def _load_partial(stream_k, work, split, col, COLS: tl.constexpr, TILE: tl.constexpr):
    """Return COLS columns from `col` on of the partial that a program stored, or zeros past the last split."""
    offsets = col + _partial_offsets(tl.program_id(0) + split * stream_k.height, COLS, TILE)
    # .cg: another SM wrote it, this SM's L1 may hold an older call's.
    return tl.load(stream_k.workspace_ptr + offsets, mask=split < work.splits, other=0.0, cache_modifier=".cg")


@triton.jit
def _partial_offsets(program, COLS: tl.constexpr, TILE: tl.constexpr):
    """Return where the first columns of the partial are that a program stored."""
    first = tl.cast(program, tl.int64) * (TILE.BLOCK_M * TILE.BLOCK_N)
    return first + tl.arange(0, TILE.BLOCK_M)[:, None] * TILE.BLOCK_N + tl.arange(0, COLS)[None, :]


@triton.jit
def buffer_of_call(epoch, BUFFERS: tl.constexpr):
    """Return which of the buffers that calls use alternately is this call's."""
    return epoch % BUFFERS


@triton.jit
def with_columns(block, columns):
    """Return a block as wide as that of the rank with the most columns: how all ranks cut theirs into tiles."""
    return Block(block.c_ptr, block.m, columns, block.stride_cm, block.epilogue)
