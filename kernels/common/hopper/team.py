"""Programs that share a tile: the last tiles of a kernel are each computed by a team, over a part of k a program.

All programs end their last tiles at once, and what they send then is sent after the last multiplication: a quarter of
the output for four tiles a program. A team of two ends one tile at half of that time and the other at its end, so half
as much is left. Smaller tiles would do the same, but they multiply slower; a team multiplies at full speed, and pays
for each tile with an exchange of sums through the L2 cache.

A program keeps one part of the tile's columns. It gives the other parts of its sums to its mates, in fp32, and adds
theirs to its own, in the order of the members after it: the same bits in every run. Rounds use two buffers in turn.
Nobody writes to one that a mate still reads: in between lies a round of which it has awaited all mates' sums, which
they gave after they had read.

Every program is resident, so mates may wait for each other. Their flags hold the number of the call.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from iris_core import signal, wait


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
def shared_turns(num_positions, whole, TILE: gl.constexpr):
    """Return how many tiles this program computes with its team, of those that are left after `whole` turns of all.

    A program that is in no team has none.
    """
    if TILE.TEAM == 1:
        return whole * 0
    else:
        teams = gl.num_programs(0) // TILE.TEAM
        team = gl.program_id(0) // TILE.TEAM
        left = gl.maximum(num_positions - whole * gl.num_programs(0) - team, 0)
        return gl.where(team < teams, gl.cdiv(left, teams), 0)


@gluon.jit
def work_of(turn, whole, num_steps, TILE: gl.constexpr):
    """Return the position of a program's `turn`-th tile, its first step and the one after its last."""
    position = gl.program_id(0) + turn * gl.num_programs(0)
    if TILE.TEAM == 1:
        return position, turn * 0, num_steps
    else:
        teams = gl.num_programs(0) // TILE.TEAM
        team = gl.program_id(0) // TILE.TEAM
        member = gl.program_id(0) % TILE.TEAM
        is_shared = turn >= whole
        shared = whole * gl.num_programs(0) + team + (turn - whole) * teams
        start = gl.where(is_shared, num_steps * member // TILE.TEAM, 0)
        stop = gl.where(is_shared, num_steps * (member + 1) // TILE.TEAM, num_steps)
        return gl.where(is_shared, shared, position), start, stop


@gluon.jit
def kept_columns(turn, whole, TILE: gl.constexpr):
    """Return the first column of its `turn`-th tile that this program keeps, and how many."""
    if TILE.TEAM == 1:
        return turn * 0, turn * 0 + TILE.BLOCK_N
    else:
        COLS: gl.constexpr = TILE.BLOCK_N // TILE.TEAM
        is_shared = turn >= whole
        return (
            gl.where(is_shared, gl.program_id(0) % TILE.TEAM * COLS, 0),
            gl.where(is_shared, COLS, TILE.BLOCK_N),
        )


@gluon.jit
def trace_number(turn):
    """Return what a trace calls a program's `turn`-th tile: its position, unless a team shares it."""
    return gl.program_id(0) + turn * gl.num_programs(0)


@gluon.jit
def sum_of_team(acc, team, round, epoch, watchdog_ptr, TILE: gl.constexpr):
    """Return the columns that this program keeps of a tile, summed over the team, from its sum over a part of k."""
    TEAM: gl.constexpr = TILE.TEAM
    program = gl.program_id(0)
    member = program % TEAM
    num_programs = gl.num_programs(0)
    first_slot = (round % 2) * num_programs * TEAM
    parts = _columns(acc, TEAM, TILE)
    kept = parts[0]
    for part in gl.static_range(TEAM):
        if part != member:
            put_sums(team.sums_ptr, first_slot + program * TEAM + part, parts[part], TILE)
        if part > 0:
            kept = gl.where(member == part, parts[part], kept)
    flags_ptr = team.flags_ptr + round * num_programs
    # Edge: this program's sums happen before what follows its mates' waits, on this GPU.
    signal(flags_ptr + program, epoch, scope="gpu")
    for distance in gl.static_range(1, TEAM):
        mate = program - member + (member + distance) % TEAM
        wait(flags_ptr + mate, epoch, watchdog_ptr, scope="gpu")
        kept += get_sums(team.sums_ptr, first_slot + mate * TEAM + member, TILE)
    return kept


@gluon.jit
def _columns(acc, PARTS: gl.constexpr, TILE: gl.constexpr):
    """Return a sum's columns in so many parts, from left to right; they stay in the registers they are in."""
    if PARTS == 1:
        LAYOUT: gl.constexpr = _layout(gl.num_warps(), TILE.BLOCK_N // TILE.TEAM)
        return (gl.convert_layout(acc, LAYOUT),)
    else:
        ROWS: gl.constexpr = acc.shape[0]
        COLS: gl.constexpr = acc.shape[1]
        left, right = acc.reshape([ROWS, 2, COLS // 2]).permute([0, 2, 1]).split()
        return _columns(left, PARTS // 2, TILE) + _columns(right, PARTS // 2, TILE)


@constexpr_function
def _layout(num_warps, cols):
    """Return how the multiply warps hold so many columns of a tile."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, cols, 16])


@gluon.jit
def put_sums(sums_ptr, slot, sums, TILE: gl.constexpr):
    """Store sums in a slot of this rank's memory."""
    gl.store(_pointers(sums_ptr, slot, TILE), sums)


@gluon.jit
def get_sums(sums_ptr, slot, TILE: gl.constexpr):
    """Load the sums in a slot."""
    # .cg: another SM wrote them, this SM's L1 may hold an older round's.
    return gl.load(_pointers(sums_ptr, slot, TILE), cache_modifier=".cg")


@gluon.jit
def _pointers(sums_ptr, slot, TILE: gl.constexpr):
    COLS: gl.constexpr = TILE.BLOCK_N // TILE.TEAM
    LAYOUT: gl.constexpr = _layout(gl.num_warps(), COLS)
    rows = gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    return sums_ptr + slot * (TILE.BLOCK_M * COLS) + rows[:, None] * COLS + cols[None, :]
