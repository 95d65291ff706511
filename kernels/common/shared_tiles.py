"""The loop of the `one_shot` kernels: tiles of one program each, then tiles that programs share, step by step of k.

Every program computes as many whole tiles as the others. What is left, less than a tile a program, is one long row of
steps, column of tiles after column of tiles, of which the sharers take equal runs: a run ends one tile and begins the
next, or lies within one. As many programs as a column has tiles take the same run, each of its own tile: they read the
same part of B at the same time, once from memory. (A row of single tiles had B read four times for M = 512.)

The program that has the first steps of a tile leads it: it waits for the others, adds their sums to its own in the
order of k, so that the bits are the same in every run, and goes on with the tile. The others leave their partial sums
in a workspace on their own GPU, and say so with the number of the call. A program leaves one sum a call at most, that
of the tile in which its run begins, and it leaves it before it waits for another's.

Nobody should wait long: runs that turn from one tile to another are shorter than others by what turning takes, and the
program that leads a tile, and leaves no sum, has more steps by what leaving one takes (`Sharing.head`).

Tiles are taken in ascending order by every program of every rank, and all programs are resident: a tile may wait for
the same tile of a peer, as the earliest that is waited for is always under way. All ranks have the same tiles, those of
the rank with the most columns: what a smaller one lacks is masked.

A short kernel of this loop is launched before the one ahead of it in the stream is done, where GPUs can do that: its
programs are there when the last tile of that one is. It begins with `gdc_wait`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris_core import gdc_launch_dependents, signal, wait_each
from iris_core.device.cache_key import in_cache_key

from .arguments import Block
from .config import MOST_SPLITS
from .gemm import matmul_steps, num_tiles, subtile, tile_origin
from .trace import MULTIPLY, STORE, SUM, WAIT, trace_span, trace_time

NONE = tl.constexpr(0)  # no tile is shared
UNEVEN = tl.constexpr(-1)  # a run may end one tile and begin the next
MOST_PARTS = tl.constexpr(2 * MOST_SPLITS)  # of a tile: so many splits in the mean, and a part more at each end
LARGE = tl.constexpr(128 * 128)  # elements of a tile of whose sums one at a time is loaded


class Sharing(NamedTuple):
    """How programs share tiles, `height` of them a column of tiles, and where the parts meet, on this rank.

    `sums_ptr` points at fp32 (sharers, BLOCK_M, BLOCK_N), the sum that a program left; `flags_ptr` at (sharers,) int64,
    the call in which it did. The first step of a tile counts for `head` more when steps are shared out, or for fewer.
    """

    sums_ptr: Any
    flags_ptr: Any
    sharers: int
    height: int
    head: int


@in_cache_key
class Part(NamedTuple):
    """A part of a tile: the steps of k from `first`, without `stop`; the `place`-th of so many `parts`."""

    tile: Any
    first: Any
    stop: Any
    place: Any
    parts: Any


@triton.jit
def compute_tiles(
    a,
    b,
    gemm,
    block,
    widest,
    a_row,
    sharing,
    target,
    peers,
    epoch,
    FINISH: tl.constexpr,
    HAS_WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute this program's tiles, and its parts of tiles, and finish those that it leads.

    PARTS says how many programs share each of the shared tiles: NONE, or UNEVEN, or so many.

    `block` is what this rank has of the output, `widest` what the rank with the most columns has; row 0 of them belongs
    to row `a_row` of A. ``FINISH(acc, target, peers, row, col, tile, tiles, epoch, WORLD_SIZE, TILE)`` takes a tile, or
    with two SUBTILES its halves.
    """
    tiles = num_tiles(widest, TILE)
    steps = tl.maximum(tl.cdiv(gemm.k, TILE.BLOCK_K), 1)
    turns = _num_turns(tiles, steps, sharing, HAS_WHOLE, PARTS)
    for turn in tl.range(0, turns, num_stages=1):
        part = _part_of(turn, tiles, steps, sharing, HAS_WHOLE, PARTS)
        row, col = tile_origin(part.tile, widest, TILE)
        began = trace_time(peers)
        stop_k = tl.minimum(part.stop * TILE.BLOCK_K, gemm.k)
        acc = matmul_steps(a, b, gemm, block, row, col, a_row + row, part.first * TILE.BLOCK_K, stop_k, TILE)
        if turn + 1 == turns:
            gdc_launch_dependents()  # its programs may take free SMs
        trace_span(peers, MULTIPLY, part.tile, began)
        if PARTS == NONE:
            FINISH(acc, target, peers, row, col, part.tile, tiles, epoch, WORLD_SIZE, TILE)
        elif part.place > 0:
            leave_part(acc, sharing, part, peers, epoch, TILE)
        else:
            total = sum_parts(acc, sharing, part, peers, epoch, TILE)
            FINISH(total, target, peers, row, col, part.tile, tiles, epoch, WORLD_SIZE, TILE)


@triton.jit
def _whole_turns(tiles, HAS_WHOLE: tl.constexpr):
    """Return how many whole tiles every program has where others are shared."""
    if HAS_WHOLE:
        return tiles // tl.num_programs(0)
    else:
        return tiles * 0


@triton.jit
def _num_turns(tiles, steps, sharing, HAS_WHOLE: tl.constexpr, PARTS: tl.constexpr):
    """Return how many tiles and parts of tiles this program has."""
    pid = tl.program_id(0)
    if PARTS == NONE:
        return tl.cdiv(tiles - pid, tl.num_programs(0))
    elif PARTS != UNEVEN:
        return _whole_turns(tiles, HAS_WHOLE) + tl.where(pid < sharing.sharers, 1, 0)
    else:
        whole = _whole_turns(tiles, HAS_WHOLE)
        start, stop = _run_of_steps(tiles - whole * tl.num_programs(0), steps, sharing)
        counted = steps + sharing.head
        last = (stop - 1 - tl.maximum(sharing.head, 0)) // counted  # of whose steps some are this program's
        return whole + tl.where(pid < sharing.sharers, last - start // counted + 1, 0)


@triton.jit
def _run_of_steps(shared_tiles, steps, sharing):
    """Return the first of this program's steps of all columns of shared tiles, and the one after its last, as counted.

    In 32 bits, as divisions of 64 take long and nothing hides them; the host sees to it that they suffice.
    """
    column_steps = shared_tiles // sharing.height * (steps + sharing.head)
    runs = sharing.sharers // sharing.height
    run = tl.program_id(0) // sharing.height
    return run * column_steps // runs, (run + 1) * column_steps // runs


@triton.jit
def _run_with(step, shared_tiles, steps, sharing):
    """Return which run a step of all columns of shared tiles, as counted, is in."""
    column_steps = shared_tiles // sharing.height * (steps + sharing.head)
    runs = sharing.sharers // sharing.height
    return ((step + 1) * runs - 1) // column_steps


@triton.jit
def _part_of(turn, tiles, steps, sharing, HAS_WHOLE: tl.constexpr, PARTS: tl.constexpr):
    """Return what this program computes in a turn."""
    pid = tl.program_id(0)
    if PARTS == NONE:
        none = turn * 0
        return Part(pid + turn * tl.num_programs(0), none, steps, none, none + 1)
    else:
        whole = _whole_turns(tiles, HAS_WHOLE)
        first_shared = whole * tl.num_programs(0)
        run = pid // sharing.height
        counted = steps + sharing.head
        if PARTS == UNEVEN:
            start, stop = _run_of_steps(tiles - first_shared, steps, sharing)
            column = start // counted + turn - whole
            begin = column * counted + sharing.head  # where the tile's own steps begin
            leader = _run_with(begin - tl.minimum(sharing.head, 0), tiles - first_shared, steps, sharing)
            parts = _run_with(begin + steps - 1, tiles - first_shared, steps, sharing) - leader + 1
            place = run - leader
            first = start - begin
            stop = tl.minimum(stop - begin, steps)
        else:
            column = run // PARTS
            parts = turn * 0 + PARTS
            place = run % PARTS
            first = place * counted // PARTS - sharing.head
            stop = (place + 1) * counted // PARTS - sharing.head
        first = tl.where(place == 0, 0, first)
        shared = column * sharing.height + pid % sharing.height
        if HAS_WHOLE:
            is_whole = turn < whole
            tile = tl.where(is_whole, pid + turn * tl.num_programs(0), first_shared + shared)
            first = tl.where(is_whole, 0, first)
            stop = tl.where(is_whole, steps, stop)
            place = tl.where(is_whole, 0, place)
            parts = tl.where(is_whole, 1, parts)
        else:
            tile = shared
        return Part(tile, first, stop, place, parts)


@triton.jit
def leave_part(acc, sharing, part, peers, epoch, TILE: tl.constexpr):
    """Leave a program's partial sum for the program that leads the tile.

    Edge: this program's stores, and its reads of the call, happen before what follows the other's `sum_parts`.
    """
    began = trace_time(peers)
    sharer = tl.program_id(0)
    tl.store(sharing.sums_ptr + _sum_offsets(sharer, TILE.BLOCK_N, TILE), acc)
    signal(sharing.flags_ptr + sharer, epoch, scope="gpu")
    trace_span(peers, STORE, part.tile, began)


@triton.jit
def sum_parts(acc, sharing, part, peers, epoch, TILE: tl.constexpr):
    """Return a tile's sum over all its parts, when they are there, in the order of k; `acc` is the first of them."""
    began = trace_time(peers)
    if part.parts > 1:
        places = tl.arange(0, MOST_PARTS) + 1
        flag_ptrs = sharing.flags_ptr + tl.program_id(0) + places * sharing.height
        wait_each(flag_ptrs, epoch, places < part.parts, peers.watchdog_ptr)
    began = trace_span(peers, WAIT, part.tile, began)
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    if TILE.SUBTILES == 1:
        ELEMENTS: tl.constexpr = TILE.BLOCK_M * BLOCK_N
        AT_ONCE: tl.constexpr = 4 if ELEMENTS < LARGE // 2 else 2 if ELEMENTS < LARGE else 1
        total = acc
        for place in tl.range(1, part.parts, AT_ONCE, num_stages=1):
            for ahead in tl.static_range(AT_ONCE):  # their loads do not wait for each other
                total += _load_sum(sharing, part, place + ahead, 0, BLOCK_N, TILE)
    else:  # in halves: a second sum of such a tile would not fit the registers
        left, right = subtile(acc, 0, TILE), subtile(acc, 1, TILE)
        for place in tl.range(1, part.parts, num_stages=1):
            left += _load_sum(sharing, part, place, 0, BLOCK_N // 2, TILE)
        for place in tl.range(1, part.parts, num_stages=1):
            right += _load_sum(sharing, part, place, BLOCK_N // 2, BLOCK_N // 2, TILE)
        total = (left, right)
    trace_span(peers, SUM, part.tile, began)
    return total


@triton.jit
def _load_sum(sharing, part, place, col, COLS: tl.constexpr, TILE: tl.constexpr):
    """Return COLS columns from `col` on of what a program left of a tile, or zeros past the last part."""
    offsets = col + _sum_offsets(tl.program_id(0) + place * sharing.height, COLS, TILE)
    # .cg: another SM wrote it, this SM's L1 may hold an older call's.
    return tl.load(sharing.sums_ptr + offsets, mask=place < part.parts, other=0.0, cache_modifier=".cg")


@triton.jit
def _sum_offsets(sharer, COLS: tl.constexpr, TILE: tl.constexpr):
    """Return where the first columns of the sum are that a program left."""
    first = tl.cast(sharer, tl.int64) * (TILE.BLOCK_M * TILE.BLOCK_N)
    return first + tl.arange(0, TILE.BLOCK_M)[:, None] * TILE.BLOCK_N + tl.arange(0, COLS)[None, :]


@triton.jit
def turn_of_call(epoch, BUFFERS: tl.constexpr):
    """Return which of the buffers that calls take in turn is this call's."""
    return epoch % BUFFERS


@triton.jit
def with_columns(block, columns):
    """Return a block as wide as that of the rank with the most columns: how all ranks cut theirs into tiles."""
    return Block(block.c_ptr, block.m, columns, block.stride_cm)
