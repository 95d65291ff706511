"""A litmus test of stores by TMA, for GPUs from sm_90 on: kernels.py says what such tests are.

A round of `descriptor_stores`: store by descriptor, await the arrival, signal; wait, load. Forbidden: the data are not
those of this round. Weakened, "arrival", the store is awaited until shared memory has been read, and no longer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

import iris_core
from iris_kernels.common.hopper.epilogue_store import wait_stores_arrived
from iris_kernels.common.hopper.gluon_names import thread_barrier, tma_store

from .kernels import TILE_COLUMNS, _flags, _late, _placed, _seeded, _slot


@gluon.jit(do_not_specialize=["rounds", "seed", "rank"])
def descriptor_stores(
    data_ptr,
    tiles,
    flags_ptr,
    forbidden_ptr,
    rounds,
    seed,
    rank,
    heap_bases,
    watchdog_ptr,
    SCOPE: gl.constexpr,
    WEAKENED: gl.constexpr,
    BLOCK: gl.constexpr,
    DELAY: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store a block to the other side by descriptor and signal; wait, load it.

    Arguments of `message_passing`, except `tiles`, which is of the other side's memory, and LAYOUT, of a block.
    """
    ROWS: gl.constexpr = BLOCK // TILE_COLUMNS
    pair, side, peer = _placed(rank, gl.program_id(0), SCOPE)
    own_flag, flag_there = _flags(flags_ptr, pair, side, rank, peer, heap_bases)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, TILE_COLUMNS, gl.SliceLayout(0, LAYOUT))
    places = rows[:, None] * TILE_COLUMNS + columns[None, :]
    staged = gl.allocate_shared_memory(gl.int32, [ROWS, TILE_COLUMNS], tiles.layout)
    state = _seeded(seed, rank)
    forbidden = 0
    for number in range(1, rounds + 1):
        if number % 2 == side:
            state = _late(state, DELAY)
            staged.store(gl.full([ROWS, TILE_COLUMNS], 0, gl.int32, LAYOUT) + number)
            fence_async_shared()
            thread_barrier()  # all of the block is there before one thread has it stored
            tma_store(tiles, [_slot(pair, 1 - side, number) * ROWS, 0], staged)
            if WEAKENED == "arrival":
                tma.store_wait(0)
            else:
                wait_stores_arrived()
            iris_core.signal(flag_there, number, scope=SCOPE)
        else:
            iris_core.wait(own_flag, number, watchdog_ptr, scope=SCOPE)
            values = gl.load(data_ptr + _slot(pair, side, number) * BLOCK + places)
            forbidden += gl.max(gl.max((values != number).to(gl.int32), axis=1), axis=0)
    gl.store(forbidden_ptr + gl.program_id(0), forbidden)
