"""The fix-up of split tiles: programs that split a tile along k exchange partial sums (waves.py).

All programs end their last tiles at once, and what they send then is sent after the last multiplication: a quarter of
the output for four tiles per program. Groups of programs end split tiles one after the other, and leave no program idle
in a last wave. Smaller tiles would do the same, but they multiply slower; a group multiplies at full speed, and pays
for each tile with an exchange of partial sums through the L2 cache.

A program stores its partial sums of the whole tile, in fp32. Then it adds those of all programs of the group, in their
order, for the subtiles that it keeps, and sends them: the same bits in every run. Each wave of split tiles has a
workspace of its own, so no program overwrites what another still reads; the next call's kernel writes when this one is
done.

Every program is resident, so they may wait for each other. Their flags hold the number of the call.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import signal, wait

from .epilogue_store import commit_store, stage_subtile
from .waves import kept_subtiles

_SPLITS_AT_ONCE = gl.constexpr(4)  # whose partials are on their way at once, for two subtiles


@gluon.jit
def exchange_partials(acc, workspace, split, first_index, epoch, watchdog_ptr, TILE: gl.constexpr):
    """Store this program's partials of a tile, and wait for those of the other programs.

    `first_index` is where the workspace has those of the first of them.
    """
    index = first_index + split.split
    store_partials(acc, workspace.tiles_ptr, index, TILE)
    # Edge: this program's partials happen before what follows the other programs' waits, on this GPU.
    signal(workspace.flags_ptr + index, epoch, scope="gpu")
    for other in range(first_index, first_index + split.splits):
        if other != index:
            wait(workspace.flags_ptr + other, epoch, watchdog_ptr, scope="gpu")


@gluon.jit
def stage_reduced(staging, workspace, split, first_index, rank, TILE: gl.constexpr):
    """Sum the subtiles that this program keeps over the group, finish them, and stage and commit them."""
    first, count = kept_subtiles(split, TILE)
    stop = first + count
    for subtile in range(first, stop, 2):
        left, right = reduce_two_subtiles(workspace.tiles_ptr, first_index, split.splits, subtile, stop, TILE)
        stage_subtile(left, staging, subtile, split.index, rank, TILE)
        if subtile + 1 < stop:
            stage_subtile(right, staging, subtile + 1, split.index, rank, TILE)
    commit_store(staging.store)


@gluon.jit
def store_partials(acc, tiles_ptr, index, TILE: gl.constexpr):
    """Store a tile's partials as the `index`-th tile of the workspace, subtile by subtile."""
    LAYOUT: gl.constexpr = acc.type.layout
    rows = gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    columns = (
        cols // TILE.SUBTILE_COLS * (TILE.BLOCK_M * TILE.SUBTILE_COLS) + cols % TILE.SUBTILE_COLS
    )  # subtiles one above the other
    offsets = rows[:, None] * TILE.SUBTILE_COLS + columns[None, :]
    gl.store(tiles_ptr + index * (TILE.BLOCK_M * TILE.BLOCK_N) + offsets, acc)


@gluon.jit
def reduce_two_subtiles(tiles_ptr, first_index, splits, subtile, stop, TILE: gl.constexpr):
    """Return a subtile, and the next one if it is before `stop`, summed over `splits` tiles of the workspace."""
    ROWS: gl.constexpr = TILE.SUBTILE_ROWS
    COLS: gl.constexpr = TILE.SUBTILE_COLS
    THREADS: gl.constexpr = COLS // 4  # of a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    offsets = rows[:, None] * COLS + cols[None, :]
    everywhere = offsets >= 0
    subtile_ptr = tiles_ptr + first_index * (TILE.BLOCK_M * TILE.BLOCK_N) + subtile * (ROWS * COLS)
    left = gl.zeros([ROWS, COLS], gl.float32, LAYOUT)
    right = gl.zeros([ROWS, COLS], gl.float32, LAYOUT)
    for batch in range(0, splits, _SPLITS_AT_ONCE):
        for i in gl.static_range(_SPLITS_AT_ONCE):
            partials = subtile_ptr + (batch + i) * (TILE.BLOCK_M * TILE.BLOCK_N) + offsets
            is_there = (batch + i < splits) & everywhere
            # .cg: another SM wrote them, this SM's L1 may hold an older call's.
            left += gl.load(partials, mask=is_there, other=0.0, cache_modifier=".cg")
            has_next = is_there & (subtile + 1 < stop)
            right += gl.load(partials + ROWS * COLS, mask=has_next, other=0.0, cache_modifier=".cg")
    return left, right
