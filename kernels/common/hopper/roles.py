"""What the multiply warps of a warp-specialised kernel do, turn by turn: a turn is one tile of a program.

Every program is 8 warps that multiply and one that loads and communicates. The 8 multiply a tile together; or, with
PINGPONG, each of the two warp groups has a tile of its own, and they multiply in turns: while one rounds its tile and
leaves it in the outbox, the other multiplies. A group whose turn has not come waits for the baton. Programs take tiles
in turns: program p its t-th at position ``p + t * num_programs``. All of them are resident, one an SM. None waits for
another of its rank, but for those that share its last tiles, if any (team.py).

A kernel that is all a call queues is launched early: its programs take SMs that the kernel ahead has left, make their
barriers, and touch no global memory before that one is done. The kernel behind may start when all programs have asked
for their last operands. `warp_specialized_copies` is not, as its side streams need a free SM.

A traced turn is written down when its tile is handed over: before, a thread's registers are full of it. With PINGPONG
there is no trace.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..trace import MULTIPLY, SUM, WAIT, trace_span, trace_time, trace_until
from .outbox import hand_over, wait_emptied
from .positions import share_of, trace_number
from .ring import multiply_tile, trace_first_step
from .team import exchange_sums, leave_sums

# Of a thread that loads and communicates; those that multiply have the rest. With 56 the handshake of 8 ranks spills.
LOADER_REGISTERS = gl.constexpr(72)
# Of a thread of the first warp group with PINGPONG; those of the second have what is left, more or as many.
MULTIPLY_REGISTERS = gl.constexpr(208)
GROUP_WARPS = gl.constexpr(4)


@constexpr_function
def first_role(pingpong):
    """Return the index of a kernel's first role: the second warp group's, which is listed first, may be left out."""
    return 0 if pingpong else 1


@constexpr_function
def worker_warps(helpers, pingpong):
    """Return the warps of each role but the first that is listed; `helpers` of them load and communicate."""
    return [GROUP_WARPS.value] * pingpong + [1] * helpers


@constexpr_function
def worker_registers(helpers, pingpong):
    """Return the registers of a thread of the same roles."""
    return [MULTIPLY_REGISTERS.value] * pingpong + [LOADER_REGISTERS.value] * helpers


@gluon.jit
def wait_baton(ring, turn):
    """Wait until the last multiplication of the turn before is under way; by the group whose turn it is."""
    if turn > 0:
        mbarrier.wait(ring.batons.index(turn % 2), ((turn - 1) // 2) & 1)


@gluon.jit
def next_baton(ring, turn):
    """Return the barrier that lets the other group multiply."""
    return ring.batons.index((turn + 1) % 2)


@gluon.jit
def multiply_second(ring, outbox, turns, num_steps, TILE: gl.constexpr):
    """Multiply the second of `turns` tiles, the fourth, …, and leave each in the outbox."""
    _multiply_every_other(1, ring, outbox, turns, num_steps, TILE)


@gluon.jit
def _multiply_every_other(first, ring, outbox, turns, num_steps, TILE: gl.constexpr):
    """Multiply every other tile from the `first` on.

    A tile's last operands are loaded when the tile before the last one is out of the outbox, so a group that waits for
    the last one to be out cannot take the one for the other.
    """
    for turn in range(first, turns, 2):
        wait_baton(ring, turn)
        acc, _ = multiply_tile(ring, turn * num_steps, num_steps, TILE, next_baton(ring, turn))
        wait_emptied(outbox, turn)
        hand_over(acc, outbox, TILE)


@gluon.jit
def multiply_tiles(ring, outbox, team, num_positions, whole, shared, num_steps, peers, epoch, TILE: gl.constexpr):
    """Multiply `whole` tiles, then `shared` with the team, and leave each, or its part of it, in the outbox.

    With PINGPONG the first of the whole ones, the third, …: the others are `multiply_second`'s.
    """
    if TILE.PINGPONG:
        _multiply_every_other(0, ring, outbox, whole, num_steps, TILE)
    else:
        _multiply_together(ring, outbox, team, num_positions, whole, shared, num_steps, peers, epoch, TILE)


@gluon.jit
def _multiply_together(ring, outbox, team, num_positions, whole, shared, num_steps, peers, epoch, TILE: gl.constexpr):
    step = 0
    for turn in range(whole):
        began = trace_first_step(ring, step, peers, trace_number(turn), TILE)
        acc, step = multiply_tile(ring, step, num_steps, TILE)
        multiplied = trace_time(peers)
        wait_emptied(outbox, turn)
        emptied = trace_time(peers)
        hand_over(acc, outbox, TILE)
        trace_until(peers, MULTIPLY, trace_number(turn), began, multiplied)
        trace_until(peers, WAIT, trace_number(turn), multiplied, emptied)
    if TILE.TEAM > 1:
        for turn in range(whole, whole + shared):
            share = share_of(turn, num_positions, whole, num_steps, TILE)
            began = trace_first_step(ring, step, peers, trace_number(turn), TILE)
            acc, step = multiply_tile(ring, step, share.stop - share.start, TILE)
            multiplied = trace_time(peers)
            exchange_sums(acc, team, share, epoch, peers.watchdog_ptr, TILE)
            exchanged = trace_time(peers)
            wait_emptied(outbox, turn)
            emptied = trace_time(peers)
            leave_sums(outbox, team, share, TILE)
            trace_until(peers, MULTIPLY, trace_number(turn), began, multiplied)
            trace_until(peers, SUM, trace_number(turn), multiplied, exchanged)
            trace_until(peers, WAIT, trace_number(turn), exchanged, emptied)
            trace_span(peers, SUM, trace_number(turn), emptied)
