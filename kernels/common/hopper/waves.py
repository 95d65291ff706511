"""The waves of a warp-specialised kernel's program: a tile in each, whole or split along k.

Program p has the tile of index ``p + w * num_programs`` in wave w, where a scheduler says what an index stands for
(../device/tile_scheduler.py). The last wave is then some programs' alone, and what they finish at once at the end is
sent after the last multiplication. With SPLITS of two or more, the tiles behind the last full wave are split along k
(fixup.py), in waves of their own: in each, every group of SPLITS programs has one tile; in the last, all programs share
the tiles that are left, as evenly as they divide, in groups as large or larger.

A program of a group multiplies one range of k steps of the tile, and then keeps one range of its subtiles
(epilogue_store.py). A group has no more programs than the tile has of either: those beyond idle in the last wave.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.tile_scheduler import TileSplit
from .arguments import Waves


@gluon.jit
def make_waves(total_tiles, num_steps, TILE: gl.constexpr, first_program=0):
    """Return this program's waves of `total_tiles`, which the programs from `first_program` on compute.

    Those before it have none. Tiles are split only where it is 0.
    """
    program = gl.program_id(0) - first_program
    programs = gl.num_programs(0) - first_program
    if TILE.SPLITS == 1:
        mine = gl.where(program < 0, 0, gl.cdiv(gl.maximum(total_tiles - program, 0), programs))
        return Waves(total_tiles, num_steps, first_program, mine, mine * 0)
    else:
        whole = gl.maximum(gl.cdiv(total_tiles, programs) - 1, 0)
        waves, left_over = _even_split_waves(total_tiles, whole, TILE)
        _, first, splits = _group_of_last_wave(left_over, num_steps, TILE)
        is_in_group = (left_over > 0) & (program - first < splits)
        split = gl.where(_is_in_even_group(TILE), waves, 0) + gl.where(is_in_group, 1, 0)
        return Waves(total_tiles, num_steps, first_program, whole, split)


@gluon.jit
def whole_tile(wave, waves):
    """Return the index of the tile that this program computes alone in a wave."""
    return gl.program_id(0) - waves.first_program + wave * (gl.num_programs(0) - waves.first_program)


@gluon.jit
def tile_split(wave, waves, TILE: gl.constexpr):
    """Return this program's part of a tile in a wave, of whole tiles or of split ones."""
    index = whole_tile(wave, waves)
    if TILE.SPLITS == 1:
        return TileSplit(index, wave * 0, waves.num_steps, wave * 0, wave * 0 + 1)
    else:
        program, programs = gl.program_id(0), gl.num_programs(0)
        _, left_over = _even_split_waves(waves.total_tiles, waves.whole, TILE)
        tile, first, splits = _group_of_last_wave(left_over, waves.num_steps, TILE)
        split_wave, in_last = _split_wave(wave, waves, TILE)
        tile = gl.where(in_last, tile, program // TILE.SPLITS)
        first = gl.where(in_last, first, program // TILE.SPLITS * TILE.SPLITS)
        splits = gl.where(in_last, splits, TILE.SPLITS)
        is_whole = wave < waves.whole
        index = gl.where(is_whole, index, waves.whole * programs + split_wave * (programs // TILE.SPLITS) + tile)
        split = gl.where(is_whole, 0, program - first)
        splits = gl.where(is_whole, 1, splits)
        start = waves.num_steps * split // splits
        return TileSplit(index, start, waves.num_steps * (split + 1) // splits, split, splits)


@gluon.jit
def kept_subtiles(split, TILE: gl.constexpr):
    """Return the first of a tile's subtiles that this program stores, and how many it stores."""
    if TILE.SPLITS == 1:
        return split.split * 0, split.split * 0 + TILE.SUBTILES
    else:
        first = TILE.SUBTILES * split.split // split.splits
        return first, TILE.SUBTILES * (split.split + 1) // split.splits - first


@gluon.jit
def first_partial(wave, waves, split, TILE: gl.constexpr):
    """Return where the workspace has the partials of the first program of a split tile, of one a wave and program."""
    split_wave, _ = _split_wave(wave, waves, TILE)
    return split_wave * gl.num_programs(0) + gl.program_id(0) - split.split


@gluon.jit
def _split_wave(wave, waves, TILE: gl.constexpr):
    """Return which of the waves of split tiles a program's wave is, and whether it is the last, with larger groups."""
    even, _ = _even_split_waves(waves.total_tiles, waves.whole, TILE)
    split_wave = gl.where(_is_in_even_group(TILE), wave - waves.whole, even)
    return split_wave, split_wave == even


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
