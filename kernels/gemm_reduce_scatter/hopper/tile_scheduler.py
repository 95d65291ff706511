"""The tile scheduler of the Hopper kernel: in which wave a program has which tile, the peers' first, then own ones too.

| waves | have |
|---|---|
| the first `ahead` | the peers' tiles |
| the next `mixed` | a batch of own tiles, and the peers' in the other programs |
| the rest | what is left of the peers' tiles, then of the own ones |

The peers' tiles are taken a batch of each shard at a time, rank+1's first; the own batch of that number comes `ahead`
waves after the last of them, so that the partials have arrived when its sums need them, though programs are up to a
wave apart. So all the time there is as much to send as to multiply. All ranks have the same order, and a peer's tile
comes before the own tile of its number: whoever waits for a partial waits for what comes earlier.

Own tiles take longer. In a mixed wave they are those of neighbouring programs, in the next wave those of the next ones,
and so round all programs from `first` on, beginning `start` after it: those before it have a wave more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.device.tile_scheduler import WorkTile, tile_origin

# Waves: a tile is multiplied in one, sent in the next, signalled in the third. With two, sums wait for partials, which
# gained only where the link is slower than the multiplication: own tiles give it the time to catch up. Where sums are
# sent, to every rank, two are better than all of them at the end.
_AHEAD, _LEAST_AHEAD = 3, 2
_OWN_US, _OWN_US_A_PEER = 1.0, 1.5  # that an own tile takes longer (8192x8192x8192 on 4 H200s: 29 µs, others 22.5)


class MixedShards(NamedTuple):
    """The (m, n) of the largest shard of C, the inner size, and the flags where partials arrive (partials.Staging).

    A rank's shard begins at row `rank * rows_apart` and column `rank * cols_apart` of C. It has `tiles`, a batch
    `batch` of them, but batch number `last`, which has what is left. The rest is the order of the tiles, as above;
    from index `own_from` on, counted through waves and programs, all are own ones.
    """

    flags_ptr: Any
    m: int
    n: int
    k: int
    rows_apart: int
    cols_apart: int
    tiles: int
    batch: int
    last: int
    ahead: int
    mixed: int
    first: int
    start: int
    own_from: int


@gluon.jit
def mixed(index, shards, rank, TILE: gl.constexpr):
    """Return the work tile of an index in the order with own tiles between the peers', the last of these at the end."""
    turn, tile = _turn_and_tile(index, shards, TILE.WORLD_SIZE)
    # Alone, so that the compiler sees that all are own.
    owner = (rank + 1 + turn) % TILE.WORLD_SIZE if TILE.WORLD_SIZE > 1 else rank
    row, col = tile_origin(tile, shards, TILE)
    a_row, b_col = owner * shards.rows_apart + row, owner * shards.cols_apart + col
    return WorkTile(index, tile, turn, owner, owner * shards.rows_apart, row, col, a_row, b_col, shards.m, shards.n)


@gluon.jit
def _turn_and_tile(index, shards, WORLD_SIZE: gl.constexpr):
    """Return whose the tile of an index is, 0 for rank+1's, WORLD_SIZE - 1 for an own one, and which of the shard's."""
    if WORLD_SIZE == 1:
        return index * 0, index
    else:
        PEERS: gl.constexpr = WORLD_SIZE - 1
        programs = gl.num_programs(0)
        wave, program = index // programs, index % programs
        number = wave - shards.ahead
        is_mixed = (number >= 0) & (number < shards.mixed)
        # In a mixed wave: programs from `first` on, round a span, of which a batch from `start` on have own tiles.
        span = programs - shards.first
        offset = program - shards.first
        start = (shards.start + number * shards.batch) % span
        beyond = offset - start + gl.where(offset < start, span, 0)
        is_own = gl.where(is_mixed, (offset >= 0) & (beyond < shards.batch), index >= shards.own_from)
        own = gl.where(is_mixed, number * shards.batch + beyond, index - PEERS * shards.tiles)
        wrapped = gl.maximum(start + shards.batch - span, 0)
        own_before = _between(offset - start, shards.batch) + _between(offset, wrapped)
        sent = index - _between(number, shards.mixed) * shards.batch - gl.where(is_mixed, own_before, 0)
        batch = gl.minimum(sent // (PEERS * shards.batch), shards.last)
        within = sent - batch * PEERS * shards.batch
        size = gl.minimum(shards.batch, shards.tiles - batch * shards.batch)
        tile = gl.where(is_own, own, batch * shards.batch + within % size)
        return gl.where(is_own, PEERS, within // size), tile


@gluon.jit
def _between(value, most):
    """Return a value, but 0 at least, and `most` at most."""
    return gl.minimum(gl.maximum(value, 0), most)


def mixed_shards(
    flags: Any,
    *,
    m: int,
    n: int,
    k: int,
    by_columns: bool,
    tiles: int,
    tile_us: float,
    wave_sent_us: float,
    sends_sums: bool,
    num_programs: int,
    world_size: int,
) -> MixedShards:
    """Return the order of the tiles of a shard of (m, n), whose partials arrive at `flags`.

    Args:
        by_columns: whether shards lie beside each other; else one above the other.
        tiles, tile_us: how many there are of a shard, and how long a program takes for a peer's.
        wave_sent_us: how long the link takes for a peer's tile of every program.
        sends_sums: whether sums go to every rank.
    """
    own = num_programs // world_size  # no more: the own tiles would run out before the peers'
    sent = (world_size - 1) * tiles
    ahead = min(_AHEAD, sent // num_programs)
    least = _LEAST_AHEAD if sends_sums or wave_sent_us > tile_us else _AHEAD
    is_mixed = sent > 0 and own > 0 and ahead >= least  # else all own tiles come last
    mixed = (sent - ahead * num_programs) // (num_programs - own) if is_mixed else 0
    batch = own or tiles
    last = max(-(-tiles // batch) - 1, 0)
    rows_apart, cols_apart = (0, n) if by_columns else (m, 0)
    first = _first_with_own(tiles, mixed * own, tile_us, num_programs, world_size)
    return MixedShards(
        *(flags, m, n, k, rows_apart, cols_apart, tiles, batch, last),
        ahead=ahead,
        mixed=mixed,
        first=first,
        start=0 if first else world_size * tiles % num_programs,  # who has a wave more comes last
        own_from=sent + mixed * own,
    )


def _first_with_own(tiles: int, mixed: int, tile_us: float, num_programs: int, world_size: int) -> int:
    """Return from which program on have own tiles in mixed waves, `mixed` in all: who has a wave more may have none."""
    more = world_size * tiles % num_programs  # programs that have a last wave, of own tiles, which others have not
    others = num_programs - more
    if not more or others < num_programs // world_size:
        return 0
    own_us = _OWN_US + _OWN_US_A_PEER * (world_size - 1)
    all_us = tile_us + own_us + -(-mixed // num_programs) * own_us
    apart_us = max(tile_us + own_us, -(-mixed // others) * own_us)
    return more if apart_us < all_us else 0
