"""Which tile a program of the Hopper kernel has in which turn: the peers' tiles first, then own ones among them.

| turns | have |
|---|---|
| the first `ahead` | the peers' tiles |
| the next `mixed` | a chunk of own tiles, and the peers' in the other programs |
| the rest | what is left of the peers' tiles, then of the own ones |

The peers' tiles are taken a chunk of each shard at a time, rank+1's first; the own chunk of that number comes `ahead`
turns after the last of them, so that the partials have arrived when its sums need them, though programs are up to a
turn apart. So all the time there is as much to send as to multiply. All ranks have the same order, and a peer's tile
comes before the own tile of its number: whoever waits for a partial waits for what comes earlier.

Own tiles take longer. In a mixed turn they are those of neighbouring programs, in the next turn those of the next ones,
and so round all programs from `first` on, beginning `start` behind it: those before it have a turn more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.device.cache_key import in_cache_key

# Turns: a tile is multiplied in one, sent in the next, announced in the third. With two, sums wait for partials, which
# gained only where the link is slower than the multiplication: own tiles give it the time to catch up. Where sums are
# sent, to every rank, two are better than all of them at the end.
_AHEAD, _LEAST_AHEAD = 3, 2
_OWN_US, _OWN_US_A_PEER = 1.0, 1.5  # that an own tile takes longer (8192x8192x8192 on 4 H200s: 29 µs, others 22.5)


class Shards(NamedTuple):
    """The (m, n) of the largest shard of C, the inner size, and the flags where partials arrive (partials.Staging).

    A rank's shard begins at row `rank * rows_apart` and column `rank * cols_apart` of C. It has `tiles`, a chunk
    `chunk` of them, but chunk number `last`, which has what is left. The rest is the order of the tiles, as above;
    from position `behind` on, counted through turns and programs, all are own ones.
    """

    flags_ptr: Any
    m: int
    n: int
    k: int
    rows_apart: int
    cols_apart: int
    tiles: int
    chunk: int
    last: int
    ahead: int
    mixed: int
    first: int
    start: int
    behind: int


@in_cache_key
class Work(NamedTuple):
    """A program's tile: whose it is, by the distance to its rank, 0 for an own one; and which of the shard's."""

    distance: Any
    tile: Any


@gluon.jit
def work_in(turn, shards, WORLD_SIZE: gl.constexpr):
    """Return what this program does in a turn."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    position = program + turn * programs
    if WORLD_SIZE == 1:
        return Work(position * 0, position)
    else:
        PEERS: gl.constexpr = WORLD_SIZE - 1
        number = turn - shards.ahead
        is_mixed = (number >= 0) & (number < shards.mixed)
        # In a mixed turn: programs from `first` on, as a ring, of which a chunk from `start` on have own tiles.
        ring = programs - shards.first
        place = program - shards.first
        start = (shards.start + number * shards.chunk) % ring
        beyond = place - start + gl.where(place < start, ring, 0)
        is_own = gl.where(is_mixed, (place >= 0) & (beyond < shards.chunk), position >= shards.behind)
        own = gl.where(is_mixed, number * shards.chunk + beyond, position - PEERS * shards.tiles)
        wrapped = gl.maximum(start + shards.chunk - ring, 0)
        own_before = _between(place - start, shards.chunk) + _between(place, wrapped)
        sent = position - _between(number, shards.mixed) * shards.chunk - gl.where(is_mixed, own_before, 0)
        chunk = gl.minimum(sent // (PEERS * shards.chunk), shards.last)
        within = sent - chunk * PEERS * shards.chunk
        size = gl.minimum(shards.chunk, shards.tiles - chunk * shards.chunk)
        tile = gl.where(is_own, own, chunk * shards.chunk + within % size)
        return Work(gl.where(is_own, 0, within // size + 1), tile)


@gluon.jit
def _between(value, most):
    """Return a value, but 0 at least, and `most` at most."""
    return gl.minimum(gl.maximum(value, 0), most)


def order_tiles(
    flags: Any,
    *,
    m: int,
    n: int,
    k: int,
    by_columns: bool,
    tiles: int,
    tile_us: float,
    turn_sent_us: float,
    sends_sums: bool,
    num_programs: int,
    world_size: int,
) -> Shards:
    """Return the order of the tiles of a shard of (m, n), whose partials arrive at `flags`.

    Args:
        by_columns: whether shards lie beside each other; else one above the other.
        tiles, tile_us: how many there are of a shard, and how long a program takes for a peer's.
        turn_sent_us: how long the link takes for a peer's tile of every program.
        sends_sums: whether sums go to every rank.
    """
    own = num_programs // world_size  # no more: the own tiles would run out before the peers'
    sent = (world_size - 1) * tiles
    ahead = min(_AHEAD, sent // num_programs)
    least = _LEAST_AHEAD if sends_sums or turn_sent_us > tile_us else _AHEAD
    is_mixed = sent > 0 and own > 0 and ahead >= least  # else all own tiles come last
    mixed = (sent - ahead * num_programs) // (num_programs - own) if is_mixed else 0
    chunk = own or tiles
    last = max(-(-tiles // chunk) - 1, 0)
    rows_apart, cols_apart = (0, n) if by_columns else (m, 0)
    first = _first_with_own(tiles, mixed * own, tile_us, num_programs, world_size)
    return Shards(
        *(flags, m, n, k, rows_apart, cols_apart, tiles, chunk, last),
        ahead=ahead,
        mixed=mixed,
        first=first,
        start=0 if first else world_size * tiles % num_programs,  # who has a turn more comes last
        behind=sent + mixed * own,
    )


def _first_with_own(tiles: int, mixed: int, tile_us: float, num_programs: int, world_size: int) -> int:
    """Return from which program on have own tiles in mixed turns, `mixed` in all: who has a turn more may have none."""
    more = world_size * tiles % num_programs  # programs that have a last turn, of own tiles, which others have not
    others = num_programs - more
    if not more or others < num_programs // world_size:
        return 0
    own_us = _OWN_US + _OWN_US_A_PEER * (world_size - 1)
    all_us = tile_us + own_us + -(-mixed // num_programs) * own_us
    apart_us = max(tile_us + own_us, -(-mixed // others) * own_us)
    return more if apart_us < all_us else 0
