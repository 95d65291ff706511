"""What the programs of a warp-specialised kernel do, turn by turn: a turn is one tile of a program.

Every program is 8 warps that multiply and one that loads and communicates. Programs take tiles in turns: program p its
t-th at position ``p + t * num_programs``. All of them are resident, one an SM, and none waits for another of its rank.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .outbox import hand_over, wait_emptied
from .ring import multiply_tile

# Of a thread that loads and communicates; those that multiply have the rest. With 56 the handshake of 8 ranks spills.
LOADER_REGISTERS = gl.constexpr(72)


@gluon.jit
def num_turns(num_positions):
    """Return how many of the positions 0, 1, … are this program's."""
    return gl.cdiv(gl.maximum(num_positions - gl.program_id(0), 0), gl.num_programs(0))


@gluon.jit
def multiply_tiles(ring, outbox, turns, num_steps, TILE: gl.constexpr):
    """Multiply `turns` tiles and leave each in the outbox."""
    step = 0
    for turn in range(turns):
        acc, step = multiply_tile(ring, step, num_steps, TILE)
        wait_emptied(outbox, turn)
        hand_over(acc, outbox, TILE)
