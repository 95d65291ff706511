"""A tile scheduler for warp-specialised kernels: a program's work tile in each wave, whole or split along k.

All-scatter and all-gather by copies use it; reduce-scatter and all-gather by programs have their own orders.

Program p has tile ``p + w * num_programs`` in wave w. The last wave is then some programs' alone, and what they finish
at once at the end is sent after the last multiplication. With SPLITS of two or more, the tiles behind the last full
wave are split along k (fixup.py), in waves of their own: in each, every group of SPLITS programs has one tile; in the
last, all programs share the tiles that are left, as evenly as they divide, in groups as large or larger.

A program of a group multiplies one range of k steps of the tile, and then keeps one range of its subtiles
(epilogue_store.py). A group has no more programs than the tile has of either: those beyond idle in the last wave.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arguments import WorkTile

SUBTILE_COLS = gl.constexpr(64)  # 128 bytes, the widest row of a swizzled tile


@gluon.jit
def num_waves(total_tiles):
    """Return how many of the tiles 0, 1, … are this program's, one a wave."""
    return gl.cdiv(gl.maximum(total_tiles - gl.program_id(0), 0), gl.num_programs(0))


@gluon.jit
def whole_waves(total_tiles, TILE: gl.constexpr):
    """Return how many tiles this program computes by itself: all, or as many as every other one."""
    if TILE.SPLITS == 1:
        return num_waves(total_tiles)
    else:
        return gl.maximum(gl.cdiv(total_tiles, gl.num_programs(0)) - 1, 0)


@gluon.jit
def split_waves(total_tiles, whole, num_steps, TILE: gl.constexpr):
    """Return how many split tiles this program has a part of, of those that are left after `whole` waves."""
    if TILE.SPLITS == 1:
        return whole * 0
    else:
        waves, left_over = _even_split_waves(total_tiles, whole, TILE)
        _, first, splits = _group_of_last_wave(left_over, num_steps, TILE)
        is_in_group = (left_over > 0) & (gl.program_id(0) - first < splits)
        return gl.where(_is_in_even_group(TILE), waves, 0) + gl.where(is_in_group, 1, 0)


@gluon.jit
def work_tile(wave, total_tiles, whole, num_steps, TILE: gl.constexpr):
    """Return this program's work in a `wave`, of `whole` ones and those of split tiles."""
    program = gl.program_id(0)
    index = program + wave * gl.num_programs(0)
    if TILE.SPLITS == 1:
        return WorkTile(index, wave * 0, num_steps, wave * 0, wave * 0 + TILE.SUBTILES, program, wave * 0 + 1, wave * 0)
    else:
        waves, left_over = _even_split_waves(total_tiles, whole, TILE)
        tile, first, splits = _group_of_last_wave(left_over, num_steps, TILE)
        split_wave = gl.where(_is_in_even_group(TILE), wave - whole, waves)
        in_last = split_wave == waves
        tile = gl.where(in_last, tile, program // TILE.SPLITS)
        first = gl.where(in_last, first, program // TILE.SPLITS * TILE.SPLITS)
        splits = gl.where(in_last, splits, TILE.SPLITS)
        is_whole = wave < whole
        split_index = whole * gl.num_programs(0) + split_wave * (gl.num_programs(0) // TILE.SPLITS) + tile
        index = gl.where(is_whole, index, split_index)
        first = gl.where(is_whole, program, first)
        splits = gl.where(is_whole, 1, splits)
        split = program - first
        subtile = TILE.SUBTILES * split // splits
        return WorkTile(
            index,
            num_steps * split // splits,
            num_steps * (split + 1) // splits,
            subtile,
            TILE.SUBTILES * (split + 1) // splits - subtile,
            first,
            splits,
            split_wave,
        )


@gluon.jit
def trace_number(wave):
    """Return what a trace calls a program's tile of a `wave`: its index, unless it is split."""
    return gl.program_id(0) + wave * gl.num_programs(0)


@gluon.jit
def _even_split_waves(total_tiles, whole, TILE: gl.constexpr):
    """Return the number of waves in which each group has a tile, and of tiles that are left over for the last."""
    groups = gl.num_programs(0) // TILE.SPLITS
    left = total_tiles - whole * gl.num_programs(0)
    return left // groups, left % groups


@gluon.jit
def _is_in_even_group(TILE: gl.constexpr):
    """Whether this program is in a group in every wave of split tiles, not in the last one alone."""
    return gl.program_id(0) < gl.num_programs(0) // TILE.SPLITS * TILE.SPLITS


@gluon.jit
def _group_of_last_wave(left_over, num_steps, TILE: gl.constexpr):
    """Return which tile this program has in the last wave, its group's first program, and how many the group has.

    Programs that would be more than it can have come after them.
    """
    programs = gl.num_programs(0)
    tiles = gl.maximum(left_over, 1)
    tile = gl.program_id(0) * tiles // programs
    first = gl.cdiv(tile * programs, tiles)
    stop = gl.cdiv((tile + 1) * programs, tiles)
    return tile, first, gl.minimum(stop - first, gl.minimum(TILE.SUBTILES, num_steps))
