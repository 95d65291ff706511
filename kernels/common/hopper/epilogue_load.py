"""The epilogue load pipeline: a warp loads peers' partial tiles, 64 columns a stage, and the multiply warps add them.

The stages use the epilogue store's memory while it is empty. Columns of the tile are summed over all peers before the
next ones, so that as many loads are in flight as there are stages, and each element's sum has a fixed order.

`partials` is a tensor descriptor of three dimensions, (source rank, row, column).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .arguments import EpilogueLoad
from .gluon_names import reinterpret, thread_barrier, tma_load
from .pipeline import (
    consumer_release,
    consumer_wait,
    make_pipeline,
    pipeline_state,
    producer_acquire,
    producer_commit,
)


@gluon.jit
def make_epilogue_load(store, partials, TILE: gl.constexpr):
    """Return stages for blocks of the descriptor `partials` in the epilogue store's memory."""
    STAGES: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILE_COLS
    stages = reinterpret(store.subtiles, partials.dtype, [STAGES, 1, TILE.BLOCK_M, TILE.SUBTILE_COLS], partials.layout)
    return EpilogueLoad(stages, make_pipeline(1, ONE_WAY=True), make_pipeline(STAGES))


@gluon.jit
def num_loads(TILE: gl.constexpr):
    """Return how many loads the partials of a tile are."""
    return TILE.BLOCK_N // TILE.SUBTILE_COLS * (TILE.WORLD_SIZE - 1)


@gluon.jit
def load_partials(load, partials, number, rank, row, col, TILE: gl.constexpr):
    """Load the peers' partials of a tile, which are there: loads from `number` on; return the next one's number."""
    STAGES: gl.constexpr = TILE.BLOCK_N // TILE.SUBTILE_COLS
    for i in range(STAGES * (TILE.WORLD_SIZE - 1)):
        state = pipeline_state(load.barriers, number)
        source = (rank + 1 + i % (TILE.WORLD_SIZE - 1)) % TILE.WORLD_SIZE
        producer_acquire(load.barriers, state)
        producer_commit(load.barriers, state.index, partials.block_type.nbytes)
        from_col = col + i // (TILE.WORLD_SIZE - 1) * TILE.SUBTILE_COLS
        full = load.barriers.full.index(state.index)
        tma_load(partials, [source, row, from_col], full, load.stages.index(state.index))
        number += 1
    return number


@gluon.jit
def add_partials(acc, load, number, TILE: gl.constexpr):
    """Return a tile plus the peers' partials of it, in the order rank+1, rank+2, …; loads from `number` on."""
    acc, _ = _add_all(acc, load, number, TILE)
    return acc


@gluon.jit
def _add_all(acc, load, number, TILE: gl.constexpr):
    """Return the sum, and the next load's number."""
    COLS: gl.constexpr = acc.shape[1]
    if COLS > TILE.SUBTILE_COLS:
        ROWS: gl.constexpr = acc.shape[0]
        LAYOUT: gl.constexpr = acc.type.layout
        left, right = acc.reshape([ROWS, 2, COLS // 2]).permute([0, 2, 1]).split()
        left, number = _add_all(left, load, number, TILE)
        right, number = _add_all(right, load, number, TILE)
        acc = gl.join(left, right).permute([0, 2, 1]).reshape([ROWS, COLS])
        return gl.convert_layout(acc, LAYOUT), number
    else:
        return _add_columns(acc, load, number, TILE)


@gluon.jit
def _add_columns(acc, load, number, TILE: gl.constexpr):
    for _ in range(1, TILE.WORLD_SIZE):
        state = pipeline_state(load.barriers, number)
        consumer_wait(load.barriers, state)
        partial = load.stages.index(state.index).reshape([TILE.BLOCK_M, TILE.SUBTILE_COLS]).load(acc.type.layout)
        fence_async_shared()  # every thread's reads, before the stage is loaded again
        thread_barrier()  # the arrival is one thread's
        consumer_release(load.barriers, state.index)
        acc += partial.to(gl.float32)
        number += 1
    return acc, number
