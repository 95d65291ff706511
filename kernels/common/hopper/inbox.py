"""Peers' partial tiles on their way in: a warp loads them in slabs of 64 columns, the multiply warps add them.

The slabs use the outbox's memory while it is empty, as a ring: message i uses slab ``i % SLABS``, for the
``i // SLABS``-th time. A slab of the tile is summed over all peers before the next one, so that as many messages are in
flight as there are slabs, and each element's sum has a fixed order.

`slots` is a tensor descriptor of three dimensions, (sender, row, column).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .arguments import Inbox
from .barrier import thread_barrier
from .positions import PIECE_COLS


@gluon.jit
def open_inbox(outbox, slots, TILE: gl.constexpr):
    """Return the outbox's memory as slabs for blocks of the descriptor `slots`."""
    SLABS: gl.constexpr = TILE.BLOCK_N // PIECE_COLS
    slabs = outbox.pieces._reinterpret(slots.dtype, [SLABS, 1, TILE.BLOCK_M, PIECE_COLS], slots.layout)
    vacated = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(vacated, count=1)
    arrived = gl.allocate_shared_memory(gl.int64, [SLABS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [SLABS, 1], mbarrier.MBarrierLayout())
    for slab in gl.static_range(SLABS):
        mbarrier.init(arrived.index(slab), count=1)
        mbarrier.init(taken.index(slab), count=1)
    return Inbox(slabs, vacated, arrived, taken)


@gluon.jit
def vacate(inbox):
    """Let partials be loaded, once in every turn that has some; by the warp that empties the outbox."""
    mbarrier.arrive(inbox.vacated, count=1)


@gluon.jit
def wait_vacated(inbox, turn):
    """Wait until partials may be loaded, for the `turn`-th time.

    The outbox's own barrier would not do: it passes in every turn, and a warp that is not there each time cannot tell
    its phases apart.
    """
    mbarrier.wait(inbox.vacated, turn & 1)


@gluon.jit
def num_messages(WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Return how many messages the partials of a tile are."""
    return TILE.BLOCK_N // PIECE_COLS * (WORLD_SIZE - 1)


@gluon.jit
def load_partials(inbox, slots, message, rank, row, col, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Load the peers' partials of a tile, which are there; return the next message."""
    SLABS: gl.constexpr = TILE.BLOCK_N // PIECE_COLS
    for i in range(SLABS * (WORLD_SIZE - 1)):
        slab = message % SLABS
        sender = (rank + 1 + i % (WORLD_SIZE - 1)) % WORLD_SIZE
        mbarrier.wait(inbox.taken.index(slab), ((message // SLABS) & 1) ^ 1)
        mbarrier.expect(inbox.arrived.index(slab), slots.block_type.nbytes)
        from_col = col + i // (WORLD_SIZE - 1) * PIECE_COLS
        tma.async_copy_global_to_shared(
            slots, [sender, row, from_col], inbox.arrived.index(slab), inbox.slabs.index(slab)
        )
        message += 1
    return message


@gluon.jit
def add_partials(acc, inbox, message, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Return a tile plus the peers' partials of it, in the order rank+1, rank+2, …, and the next message."""
    COLS: gl.constexpr = acc.shape[1]
    if COLS > PIECE_COLS:
        ROWS: gl.constexpr = acc.shape[0]
        LAYOUT: gl.constexpr = acc.type.layout
        left, right = acc.reshape([ROWS, 2, COLS // 2]).permute([0, 2, 1]).split()
        left, message = add_partials(left, inbox, message, WORLD_SIZE, TILE)
        right, message = add_partials(right, inbox, message, WORLD_SIZE, TILE)
        acc = gl.join(left, right).permute([0, 2, 1]).reshape([ROWS, COLS])
        return gl.convert_layout(acc, LAYOUT), message
    else:
        return _add_slab(acc, inbox, message, WORLD_SIZE, TILE)


@gluon.jit
def _add_slab(acc, inbox, message, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    SLABS: gl.constexpr = TILE.BLOCK_N // PIECE_COLS
    for _ in range(1, WORLD_SIZE):
        slab = message % SLABS
        mbarrier.wait(inbox.arrived.index(slab), (message // SLABS) & 1)
        part = inbox.slabs.index(slab).reshape([TILE.BLOCK_M, PIECE_COLS]).load(acc.type.layout)
        fence_async_shared()  # every thread's reads, before the slab is loaded again
        thread_barrier()  # the arrival is one thread's
        mbarrier.arrive(inbox.taken.index(slab), count=1)
        acc += part.to(gl.float32)
        message += 1
    return acc, message
