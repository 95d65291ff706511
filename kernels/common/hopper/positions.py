"""Which tiles a program of a warp-specialised kernel computes, turn by turn, and which of them with others.

Program p has the tile at position ``p + t * num_programs`` in its t-th turn. The last turn is then some programs'
alone, and what they finish at once at the end is sent after the last multiplication. With teams, the tiles behind the
last turn that all programs have are shared (team.py), in rounds: in each, every team of TEAM programs has one tile; in
the last, all programs share what is left over, as evenly as they divide, in teams as large or larger.

A member of a team multiplies one run of steps of the tile, and then keeps one run of its pieces (outbox.py). A team has
no more members than there are of either: what is over idles in the last round.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arguments import Share

PIECE_COLS = gl.constexpr(64)  # 128 bytes, the widest row of a swizzled tile


@gluon.jit
def num_turns(num_positions):
    """Return how many of the positions 0, 1, … are this program's."""
    return gl.cdiv(gl.maximum(num_positions - gl.program_id(0), 0), gl.num_programs(0))


@gluon.jit
def whole_turns(num_positions, TILE: gl.constexpr):
    """Return how many tiles this program computes by itself: all, or as many as every other one."""
    if TILE.TEAM == 1:
        return num_turns(num_positions)
    else:
        return gl.maximum(gl.cdiv(num_positions, gl.num_programs(0)) - 1, 0)


@gluon.jit
def shared_turns(num_positions, whole, num_steps, TILE: gl.constexpr):
    """Return how many tiles this program shares, of those that are left after `whole` turns of all."""
    if TILE.TEAM == 1:
        return whole * 0
    else:
        rounds, left_over = _rounds(num_positions, whole, TILE)
        _, first, members = _team_of_last_round(left_over, num_steps, TILE)
        is_member = (left_over > 0) & (gl.program_id(0) - first < members)
        return gl.where(_has_team(TILE), rounds, 0) + gl.where(is_member, 1, 0)


@gluon.jit
def share_of(turn, num_positions, whole, num_steps, TILE: gl.constexpr):
    """Return what this program does in its `turn`-th turn, of `whole` ones and those that it shares."""
    program = gl.program_id(0)
    position = program + turn * gl.num_programs(0)
    if TILE.TEAM == 1:
        return Share(position, turn * 0, num_steps, turn * 0, turn * 0 + TILE.PIECES, program, turn * 0 + 1, turn * 0)
    else:
        rounds, left_over = _rounds(num_positions, whole, TILE)
        tile, first, members = _team_of_last_round(left_over, num_steps, TILE)
        round = gl.where(_has_team(TILE), turn - whole, rounds)
        in_last = round == rounds
        tile = gl.where(in_last, tile, program // TILE.TEAM)
        first = gl.where(in_last, first, program // TILE.TEAM * TILE.TEAM)
        members = gl.where(in_last, members, TILE.TEAM)
        is_whole = turn < whole
        behind = whole * gl.num_programs(0) + round * (gl.num_programs(0) // TILE.TEAM) + tile
        position = gl.where(is_whole, position, behind)
        first = gl.where(is_whole, program, first)
        members = gl.where(is_whole, 1, members)
        member = program - first
        piece = TILE.PIECES * member // members
        return Share(
            position,
            num_steps * member // members,
            num_steps * (member + 1) // members,
            piece,
            TILE.PIECES * (member + 1) // members - piece,
            first,
            members,
            round,
        )


@gluon.jit
def trace_number(turn):
    """Return what a trace calls a program's `turn`-th tile: its position, unless a team shares it."""
    return gl.program_id(0) + turn * gl.num_programs(0)


@gluon.jit
def _rounds(num_positions, whole, TILE: gl.constexpr):
    """Return the number of rounds in which each team has a tile, and of tiles that are left over for the last."""
    teams = gl.num_programs(0) // TILE.TEAM
    left = num_positions - whole * gl.num_programs(0)
    return left // teams, left % teams


@gluon.jit
def _has_team(TILE: gl.constexpr):
    """Whether this program is in a team in every round, not in the last one alone."""
    return gl.program_id(0) < gl.num_programs(0) // TILE.TEAM * TILE.TEAM


@gluon.jit
def _team_of_last_round(left_over, num_steps, TILE: gl.constexpr):
    """Return which tile this program shares in the last round, its team's first program, and how many members it has.

    Programs that would be more than it can have come after them.
    """
    programs = gl.num_programs(0)
    tiles = gl.maximum(left_over, 1)
    tile = gl.program_id(0) * tiles // programs
    first = gl.cdiv(tile * programs, tiles)
    stop = gl.cdiv((tile + 1) * programs, tiles)
    return tile, first, gl.minimum(stop - first, gl.minimum(TILE.PIECES, num_steps))
