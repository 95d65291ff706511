"""The loop of the `one_shot` kernels: tiles of one program each, then tiles that programs share, step by step of k.

Every program computes as many whole tiles as the others. What is left, less than a tile a program, is one long row of
steps, column of tiles after column of tiles, of which the sharers take equal runs: a run ends one tile and begins the
next, or lies within one. As many programs as a column has tiles take the same run, each of its own tile: they read the
same part of B at the same time, once from memory. (A row of single tiles had B read four times for M = 512.)

A program stores its partial sum of a shared tile to a workspace on its own GPU and counts it; the program that counts a
tile's last one adds all of them in the order of k and goes on with the tile. So the sum has the same bits in every run,
whoever is last. Counts grow over all calls and are never reset, but by `Context.reset`.

Tiles are taken in ascending order by every program of every rank, and all programs are resident: a tile may wait for
the same tile of a peer, as the earliest that is waited for is always under way. Every program has some work, so a call
is over when its tiles are: programs that were not a tile's last are not counted. All ranks have the same tiles, those
of the rank with the most columns: what a smaller one lacks is masked.

A kernel of this loop is launched before the one ahead of it in the stream is done, where GPUs can do that: its programs
are there when the last tile of that one is. It begins with `wait_for_earlier_kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris_core import let_next_kernel_start

from .arguments import Block
from .gemm import matmul_steps, num_tiles, subtile, tile_origin
from .trace import MULTIPLY, SUM, trace_span, trace_time

NONE = tl.constexpr(0)  # no tile is shared
UNEVEN = tl.constexpr(-1)  # a run may end one tile and begin the next
LARGE = tl.constexpr(128 * 128)  # elements of a tile whose sum takes longer to store than a look at a count takes


class Sharing(NamedTuple):
    """Where the parts of shared tiles meet, on this rank, and how many programs share them, `height` a column of tiles.

    `sums_ptr` points at fp32 (sharers + shared tiles, BLOCK_M, BLOCK_N), `counts_ptr` at (shared tiles,) int64.
    """

    sums_ptr: Any
    counts_ptr: Any
    sharers: int
    height: int


class Part(NamedTuple):
    """A part of a tile: the steps of k from `first`, without `stop`; the `place`-th of so many `parts`.

    `shared` is the tile's number among those that are shared.
    """

    tile: Any
    first: Any
    stop: Any
    place: Any
    parts: Any
    shared: Any


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
    """Compute this program's tiles, and its parts of tiles, and finish those of which it is the last.

    PARTS says how many programs share each of the shared tiles: NONE, or UNEVEN, or so many.

    `block` is what this rank has of the output, `widest` what the rank with the most columns has; row 0 of them belongs
    to row `a_row` of A. ``FINISH(acc, target, peers, row, col, tile, tiles, epoch, WORLD_SIZE, TILE)`` takes a tile.
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
            let_next_kernel_start()  # its programs may take free SMs
        trace_span(peers, MULTIPLY, part.tile, began)
        if PARTS == NONE or (HAS_WHOLE and part.parts == 1):
            FINISH(acc, target, peers, row, col, part.tile, tiles, epoch, WORLD_SIZE, TILE)
        elif meets_last(acc, sharing, part, epoch, TILE):
            total = sum_parts(acc, sharing, part, peers, TILE)
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
        return whole + tl.where(pid < sharing.sharers, (stop - 1) // steps - start // steps + 1, 0)


@triton.jit
def _run_of_steps(shared_tiles, steps, sharing):
    """Return the first of this program's steps of all columns of shared tiles, and the one after its last.

    In 32 bits, as divisions of 64 take long and nothing hides them; the host sees to it that they suffice.
    """
    column_steps = shared_tiles // sharing.height * steps
    runs = sharing.sharers // sharing.height
    run = tl.program_id(0) // sharing.height
    return run * column_steps // runs, (run + 1) * column_steps // runs


@triton.jit
def _run_with(step, shared_tiles, steps, sharing):
    """Return which run a step of all columns of shared tiles is in."""
    column_steps = shared_tiles // sharing.height * steps
    runs = sharing.sharers // sharing.height
    return ((step + 1) * runs - 1) // column_steps


@triton.jit
def _part_of(turn, tiles, steps, sharing, HAS_WHOLE: tl.constexpr, PARTS: tl.constexpr):
    """Return what this program computes in a turn."""
    pid = tl.program_id(0)
    if PARTS == NONE:
        none = turn * 0
        return Part(pid + turn * tl.num_programs(0), none, steps, none, none + 1, none)
    else:
        whole = _whole_turns(tiles, HAS_WHOLE)
        first_shared = whole * tl.num_programs(0)
        run = pid // sharing.height
        if PARTS == UNEVEN:
            start, stop = _run_of_steps(tiles - first_shared, steps, sharing)
            column = start // steps + turn - whole
            begin = column * steps
            leader = _run_with(begin, tiles - first_shared, steps, sharing)
            parts = _run_with(begin + steps - 1, tiles - first_shared, steps, sharing) - leader + 1
            place = run - leader
            first = tl.maximum(start - begin, 0)
            stop = tl.minimum(stop - begin, steps)
        else:
            column = run // PARTS
            parts = turn * 0 + PARTS
            place = run % PARTS
            first = place * steps // PARTS
            stop = (place + 1) * steps // PARTS
        shared = column * sharing.height + pid % sharing.height
        if HAS_WHOLE:
            is_whole = turn < whole
            tile = tl.where(is_whole, pid + turn * tl.num_programs(0), first_shared + shared)
            first = tl.where(is_whole, 0, first)
            stop = tl.where(is_whole, steps, stop)
            parts = tl.where(is_whole, 1, parts)
        else:
            tile = shared
        return Part(tile, first, stop, place, parts, shared)


@triton.jit
def meets_last(acc, sharing, part, epoch, TILE: tl.constexpr):
    """Keep a program's partial sum where its tile's parts meet; return whether all of the tile's are there now.

    The last of two large ones is not stored: whoever finds the other there needs it nowhere but in registers.
    Edge: every part's stores happen before what follows in the program that is told so.
    """
    count_ptr = sharing.counts_ptr + part.shared
    if TILE.BLOCK_M * TILE.BLOCK_N >= LARGE:
        is_needed = (part.parts > 2) | (tl.atomic_add(count_ptr, 0, sem="relaxed", scope="gpu") < epoch * 2 - 1)
    else:
        is_needed = part.parts > 0
    if is_needed:
        tl.store(sharing.sums_ptr + _sum_offsets(_slot_of(sharing, part, part.place), TILE.BLOCK_N, TILE), acc)
    tl.debug_barrier()  # the atomic is one thread's: every thread's stores must come before it
    # Acquire-release within the GPU: collects the other parts' stores, and their programs' reads of the call.
    count = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") + 1
    return count == epoch * part.parts


@triton.jit
def sum_parts(acc, sharing, part, peers, TILE: tl.constexpr):
    """Return a tile's sum over all its parts, in the order of k; `acc` is this program's. After `meets_last`."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    began = trace_time(peers)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if BLOCK_M * BLOCK_N >= LARGE and part.parts == 2:  # in either order the same bits
        total = _with_other(acc, sharing, part, TILE)
    else:
        AT_ONCE: tl.constexpr = 4 if BLOCK_M * BLOCK_N < LARGE // 2 else 2 if BLOCK_M * BLOCK_N < LARGE else 1
        for place in tl.range(0, part.parts, AT_ONCE, num_stages=1):
            total += _load_sum(sharing, part, place, TILE)
            for ahead in tl.static_range(1, AT_ONCE):  # their loads do not wait for each other
                total += _load_sum(sharing, part, place + ahead, TILE)
    trace_span(peers, SUM, part.tile, began)
    return total


@triton.jit
def _load_sum(sharing, part, place, TILE: tl.constexpr):
    """Return what a program left of a tile, or zeros past the last part."""
    offsets = _sum_offsets(_slot_of(sharing, part, place), TILE.BLOCK_N, TILE)
    # .cg: another SM wrote it, this SM's L1 may hold an older call's.
    return tl.load(sharing.sums_ptr + offsets, mask=place < part.parts, other=0.0, cache_modifier=".cg")


@triton.jit
def _with_other(acc, sharing, part, TILE: tl.constexpr):
    """Return a program's sum with that of the one other part of its tile."""
    slot = _slot_of(sharing, part, 1 - part.place)
    if TILE.SUBTILES == 1:
        return acc + tl.load(sharing.sums_ptr + _sum_offsets(slot, TILE.BLOCK_N, TILE), cache_modifier=".cg")
    else:  # in halves: a second sum of such a tile would not fit the registers
        COLS: tl.constexpr = TILE.BLOCK_N // 2
        left, right = subtile(acc, 0, TILE), subtile(acc, 1, TILE)
        offsets = _sum_offsets(slot, COLS, TILE)
        left += tl.load(sharing.sums_ptr + offsets, cache_modifier=".cg")
        right += tl.load(sharing.sums_ptr + offsets + COLS, cache_modifier=".cg")
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (TILE.BLOCK_M, TILE.BLOCK_N))


@triton.jit
def _slot_of(sharing, part, place):
    """Return where a part's sum is kept: in its sharer's own slot, unless it begins a tile, which has a slot too."""
    sharer = tl.program_id(0) + (place - part.place) * sharing.height
    return tl.where(place == 0, sharing.sharers + part.shared, sharer)


@triton.jit
def _sum_offsets(slot, COLS: tl.constexpr, TILE: tl.constexpr):
    """Return where the first columns of the sum in a slot are."""
    first = tl.cast(slot, tl.int64) * (TILE.BLOCK_M * TILE.BLOCK_N)
    return first + tl.arange(0, TILE.BLOCK_M)[:, None] * TILE.BLOCK_N + tl.arange(0, COLS)[None, :]


@triton.jit
def turn_of_call(epoch, BUFFERS: tl.constexpr):
    """Return which of the buffers that calls take in turn is this call's."""
    return epoch % BUFFERS


@triton.jit
def with_columns(block, columns):
    """Return a block as wide as that of the rank with the most columns: how all ranks cut theirs into tiles."""
    return Block(block.c_ptr, block.m, columns, block.stride_cm)
