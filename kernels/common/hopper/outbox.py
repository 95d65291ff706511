"""A finished tile on its way out: the multiply warps leave it in shared memory, the loader warp sends it in pieces.

A tile sent at once would fill the queue of the engine that also loads the operands, and the loads behind it would wait
for the link (0.569 ms for 8192x8192x8192 over 4 H200s). Its pieces, one every few steps of the next tile's main loop,
cost almost nothing (0.412 ms): the multiplication's own progress paces them.

`out` is a tensor descriptor of three dimensions, (rank, row, column), whose bounds are those of what this program may
write at a rank: what reaches past its end is not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..trace import SEND, trace_span, trace_time, trace_until
from .arguments import Outbox
from .barrier import thread_barrier
from .positions import PIECE_COLS, trace_number
from .ring import load_step, load_steps, next_place, place_of


@gluon.jit
def open_outbox(out, TILE: gl.constexpr):
    """Return an empty outbox for pieces of the descriptor `out`."""
    pieces = gl.allocate_shared_memory(out.dtype, [TILE.PIECES, 1, TILE.PIECE_ROWS, PIECE_COLS], out.layout)
    filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(filled, count=1)
    mbarrier.init(emptied, count=1)
    return Outbox(pieces, filled, emptied)


@gluon.jit
def wait_filled(outbox, turn):
    """Wait until the program's tile before the `turn`-th, which is not its first, is in the outbox."""
    mbarrier.wait(outbox.filled, (turn - 1) & 1)


@gluon.jit
def wait_emptied(outbox, turn):
    """Wait until the program's tile before the `turn`-th is out of the outbox; by the multiply warps."""
    if turn > 0:
        mbarrier.wait(outbox.emptied, (turn - 1) & 1)


@gluon.jit
def hand_over(acc, outbox, TILE: gl.constexpr):
    """Round a tile into the empty outbox and say that it is there; by the multiply warps."""
    SHAPE: gl.constexpr = [acc.shape[0], acc.shape[1]]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, outbox.pieces.dtype)
    outbox.pieces._reinterpret(outbox.pieces.dtype, SHAPE, LAYOUT).store(acc.to(outbox.pieces.dtype))
    say_filled(outbox)


@gluon.jit
def put_piece(piece, outbox, index, TILE: gl.constexpr):
    """Round one piece of a tile into the empty outbox; by the multiply warps."""
    SHAPE: gl.constexpr = [TILE.PIECE_ROWS, PIECE_COLS]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, outbox.pieces.dtype)
    outbox.pieces.index(index)._reinterpret(outbox.pieces.dtype, SHAPE, LAYOUT).store(piece.to(outbox.pieces.dtype))


@gluon.jit
def say_filled(outbox):
    """Say that the tile, or what is sent of it, is there; by the multiply warps."""
    fence_async_shared()  # every thread's stores, before the copy engine's reads
    thread_barrier()  # the arrival is one thread's
    mbarrier.arrive(outbox.filled, count=1)


@gluon.jit
def load_ahead(a, b, ring, step, a_row, col, start, stop, outbox, overdue, TILE: gl.constexpr):
    """Load the first steps of a tile while the tile before is multiplied, as many as there are stages.

    With `overdue`, what was sent last is still in the outbox, which the multiply warps need next: let them refill it,
    only now that all but one of the stages have something to do. Return the program's next step and the tile's.
    """
    ahead = gl.minimum(start + TILE.STAGES, stop)
    step = load_steps(a, b, ring, step, a_row, col, start, ahead - 1, TILE)
    if overdue:
        let_refill(outbox)
    return load_steps(a, b, ring, step, a_row, col, ahead - 1, ahead, TILE), ahead


@gluon.jit
def load_and_send(
    a,
    b,
    ring,
    step,
    a_row,
    col,
    start,
    stop,
    out,
    outbox,
    parcel,
    turn,
    DESTINATIONS: gl.constexpr,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Load steps of the program's `turn`-th tile while the tile before, `parcel`, is sent; return the next step.

    The pieces are spread over these steps and end an eighth before the last: they have arrived when someone waits for
    them. With PINGPONG the tile before is still on its way into the outbox: they begin after a quarter of the steps.
    """
    if TILE.PINGPONG:
        later = start + (stop - start) // 4
        step = load_steps(a, b, ring, step, a_row, col, start, later, TILE)
        start = later
    messages = 0
    if turn > 0:
        wait_filled(outbox, turn)
        messages = parcel.pieces * DESTINATIONS
    span = gl.maximum(stop - start - (stop - start) // 8, 1)
    place = place_of(step, TILE)
    sent = 0
    due = 0  # in parts of a message, of which it has `span`
    began = trace_time(parcel)
    ended = began
    for i in range(start, stop):
        load_step(a, b, ring, place, a_row, col, i * TILE.BLOCK_K, TILE)
        place = next_place(place, TILE)
        due += messages
        while (due >= span) & (sent < messages):
            _send(out, outbox, parcel, sent, DESTINATIONS, WORLD_SIZE, TILE)
            sent += 1
            due -= span
            ended = trace_time(parcel)
    while sent < messages:
        _send(out, outbox, parcel, sent, DESTINATIONS, WORLD_SIZE, TILE)
        sent += 1
        ended = trace_time(parcel)
    if turn > 0:
        trace_until(parcel, SEND, trace_number(turn - 1), began, ended)
    return step + (stop - start)


@gluon.jit
def send_last(
    out, outbox, parcel, turns, overdue, DESTINATIONS: gl.constexpr, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    """Send the last of a program's `turns` tiles, if it had any; `overdue` as in `load_ahead`."""
    if overdue:
        let_refill(outbox)
    if turns > 0:
        wait_filled(outbox, turns)
        began = trace_time(parcel)
        for message in range(parcel.pieces * DESTINATIONS):
            _send(out, outbox, parcel, message, DESTINATIONS, WORLD_SIZE, TILE)
        trace_span(parcel, SEND, trace_number(turns - 1), began)


@gluon.jit
def _send(out, outbox, parcel, message, DESTINATIONS: gl.constexpr, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Send one piece to one of the DESTINATIONS ranks from the parcel's on; a piece to all, then the next piece."""
    ROWS: gl.constexpr = TILE.BLOCK_M // TILE.PIECE_ROWS
    rank = (parcel.rank + message % DESTINATIONS) % WORLD_SIZE
    piece = parcel.piece + message // DESTINATIONS
    row = parcel.row + (piece % ROWS) * TILE.PIECE_ROWS
    col = parcel.col + (piece // ROWS) * PIECE_COLS
    tma.async_copy_shared_to_global(out, [rank, row, col], outbox.pieces.index(piece))


@gluon.jit
def let_refill(outbox):
    """Wait until all that was sent has been read, and let the multiply warps refill the outbox.

    Not that it has arrived: see `await_arrival`.
    """
    tma.store_wait(0)
    mbarrier.arrive(outbox.emptied, count=1)


@gluon.jit
def await_arrival(STORES: gl.constexpr = 0):
    """Wait until all that this warp has sent, but for the last STORES stores, has arrived, and may be announced.

    Edge: the sent pieces happen before this warp's later releases. `store_wait` is not enough, it waits for the reads
    of shared memory; and the stores are the async proxy's, which a release alone does not order (PTX ISA, "Async
    proxy").
    """
    gl.inline_asm_elementwise(_arrival_code(STORES), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@constexpr_function
def _arrival_code(stores):
    return f"cp.async.bulk.wait_group {stores}; fence.proxy.async; mov.u32 $0, 0;"
