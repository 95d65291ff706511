"""Programs that share a tile, each over a run of k: they exchange their sums (positions.py says who shares what).

All programs end their last tiles at once, and what they send then is sent after the last multiplication: a quarter of
the output for four tiles a program. Teams end tiles one after the other, and leave no program idle in a last turn.
Smaller tiles would do the same, but they multiply slower; a team multiplies at full speed, and pays for each tile with
an exchange of sums through the L2 cache.

A member gives its sums of the whole tile, in fp32. Then it adds those of all members, in their order, for the pieces
that it keeps, and sends them: the same bits in every run. Each round has sums of its own, so nobody overwrites what a
mate still reads; the next call's kernel writes when this one is done.

Every program is resident, so mates may wait for each other. Their flags hold the number of the call.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import signal, wait

from .outbox import put_piece, say_filled
from .positions import PIECE_COLS

_MATES_AT_ONCE = gl.constexpr(4)  # whose sums are on their way at once, for two pieces


@gluon.jit
def exchange_sums(acc, team, share, epoch, watchdog_ptr, TILE: gl.constexpr):
    """Give this program's sums to its mates, and wait for theirs."""
    first_slot = share.round * gl.num_programs(0)
    put_sums(acc, team.sums_ptr, first_slot + gl.program_id(0), TILE)
    # Edge: this program's sums happen before what follows its mates' waits, on this GPU.
    signal(team.flags_ptr + first_slot + gl.program_id(0), epoch, scope="gpu")
    for mate in range(share.first, share.first + share.members):
        if mate != gl.program_id(0):
            wait(team.flags_ptr + first_slot + mate, epoch, watchdog_ptr, scope="gpu")


@gluon.jit
def leave_sums(outbox, team, share, TILE: gl.constexpr):
    """Leave the pieces that this program keeps, summed over the team, in the empty outbox, and say that they are."""
    first_slot = share.round * gl.num_programs(0) + share.first
    stop = share.piece + share.pieces
    for piece in range(share.piece, stop, 2):
        left, right = sum_two_pieces(team.sums_ptr, first_slot, share.members, piece, stop, TILE)
        put_piece(left, outbox, piece, TILE)
        if piece + 1 < stop:
            put_piece(right, outbox, piece + 1, TILE)
    say_filled(outbox)


@gluon.jit
def put_sums(acc, sums_ptr, slot, TILE: gl.constexpr):
    """Store a tile's sums in a slot of this rank's memory, piece by piece."""
    LAYOUT: gl.constexpr = acc.type.layout
    rows = gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    columns = cols // PIECE_COLS * (TILE.BLOCK_M * PIECE_COLS) + cols % PIECE_COLS  # of pieces, one above the other
    offsets = rows[:, None] * PIECE_COLS + columns[None, :]
    gl.store(sums_ptr + slot * (TILE.BLOCK_M * TILE.BLOCK_N) + offsets, acc)


@gluon.jit
def sum_two_pieces(sums_ptr, first_slot, members, piece, stop, TILE: gl.constexpr):
    """Return a piece, and the next one if it is before `stop`, summed over as many slots as there are members."""
    ROWS: gl.constexpr = TILE.PIECE_ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, PIECE_COLS, gl.SliceLayout(0, LAYOUT))
    offsets = rows[:, None] * PIECE_COLS + cols[None, :]
    everywhere = offsets >= 0
    slot_ptr = sums_ptr + first_slot * (TILE.BLOCK_M * TILE.BLOCK_N) + piece * (ROWS * PIECE_COLS)
    left = gl.zeros([ROWS, PIECE_COLS], gl.float32, LAYOUT)
    right = gl.zeros([ROWS, PIECE_COLS], gl.float32, LAYOUT)
    for batch in range(0, members, _MATES_AT_ONCE):
        for i in gl.static_range(_MATES_AT_ONCE):
            sums = slot_ptr + (batch + i) * (TILE.BLOCK_M * TILE.BLOCK_N) + offsets
            is_there = (batch + i < members) & everywhere
            # .cg: another SM wrote them, this SM's L1 may hold an older call's.
            left += gl.load(sums, mask=is_there, other=0.0, cache_modifier=".cg")
            has_next = is_there & (piece + 1 < stop)
            right += gl.load(sums + ROWS * PIECE_COLS, mask=has_next, other=0.0, cache_modifier=".cg")
    return left, right
