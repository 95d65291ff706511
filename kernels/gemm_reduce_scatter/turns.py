"""What the multiply warps do that add partials: they multiply tiles, and add the peers' partials to own ones.

Both warp groups together, or, with PINGPONG, each a tile of its own, in turns (../common/hopper/roles.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.hopper.inbox import add_partials, num_messages
from ..common.hopper.outbox import hand_over, wait_emptied, wait_filled
from ..common.hopper.positions import trace_number
from ..common.hopper.ring import multiply_tile, trace_first_step
from ..common.hopper.roles import next_baton, wait_baton
from ..common.trace import MULTIPLY, SUM, WAIT, trace_time, trace_until
from .order import work_in


@gluon.jit
def sum_tiles(ring, outbox, inbox, turns, shards, num_steps, peers, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Multiply `turns` tiles, add the peers' partials to this rank's own, and leave each in the outbox.

    With PINGPONG the first, the third, …: the others are `sum_second`'s.
    """
    if TILE.PINGPONG:
        _sum_every_other(0, ring, outbox, inbox, turns, shards, num_steps, WORLD_SIZE, TILE)
    else:
        _sum_together(ring, outbox, inbox, turns, shards, num_steps, peers, WORLD_SIZE, TILE)


@gluon.jit
def sum_second(ring, outbox, inbox, turns, shards, num_steps, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """As `sum_tiles`, the second tile, the fourth, …."""
    _sum_every_other(1, ring, outbox, inbox, turns, shards, num_steps, WORLD_SIZE, TILE)


@gluon.jit
def _sum_together(ring, outbox, inbox, turns, shards, num_steps, peers, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    message = 0
    for turn in range(turns):
        is_own = work_in(turn, shards, WORLD_SIZE).distance == 0
        step = turn * num_steps  # not kept from turn to turn: every register counts
        began = trace_first_step(ring, step, peers, trace_number(turn), TILE)
        acc, step = multiply_tile(ring, step, num_steps, TILE)
        multiplied = trace_time(peers)
        if is_own:
            acc, message = add_partials(acc, inbox, message, WORLD_SIZE, TILE)
        summed = trace_time(peers)
        wait_emptied(outbox, turn)
        emptied = trace_time(peers)
        hand_over(acc, outbox, TILE)
        trace_until(peers, MULTIPLY, trace_number(turn), began, multiplied)
        if is_own:
            trace_until(peers, SUM, trace_number(turn), multiplied, summed)
        trace_until(peers, WAIT, trace_number(turn), summed, emptied)


@gluon.jit
def _sum_every_other(
    first, ring, outbox, inbox, turns, shards, num_steps, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    """Every other turn's tile, from the `first` on; they come into the outbox in order."""
    message = 0
    for turn in range(turns):
        is_own = work_in(turn, shards, WORLD_SIZE).distance == 0
        if turn % 2 == first:
            wait_baton(ring, turn)
            acc, _ = multiply_tile(ring, turn * num_steps, num_steps, TILE, next_baton(ring, turn))
            if turn > 0:
                wait_filled(outbox, turn)  # the other group's partials have been added, too
            if is_own:
                acc, message = add_partials(acc, inbox, message, WORLD_SIZE, TILE)
            wait_emptied(outbox, turn)
            hand_over(acc, outbox, TILE)
        elif is_own:
            message += num_messages(WORLD_SIZE, TILE)
