"""Which tile a program of the Hopper kernel has in which turn: rounds of the peers' tiles and the own ones.

A round is a chunk of each peer's shard, rank+1's first, then the chunk of the own shard that peers sent some rounds
back. The first rounds have no own chunk, the last has all that are left. All ranks have the same order, and a peer's
tile comes before the own tile of its number: whoever waits for a partial waits for what comes earlier.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LAG = 4  # rounds, of about a tile a program each: a tile is sent in one, announced in the next


class Shards(NamedTuple):
    """The (m, n) of the largest shard of C, the inner size, and the flags where partials arrive (partials.Staging).

    A rank's shard begins at row `rank * rows_apart` and column `rank * cols_apart` of C. It has `tiles`, a chunk
    `chunk` of them. Own chunks come `lag` rounds after the peers'; number `last` of the rounds in which both come has
    the peers' last chunk, of `last_chunk` tiles.
    """

    flags_ptr: Any
    m: int
    n: int
    k: int
    rows_apart: int
    cols_apart: int
    tiles: int
    chunk: int
    lag: int
    last: int
    last_chunk: int


class Work(NamedTuple):
    """A program's tile: whose it is, by the distance to its rank, 0 for an own one; and which of the shard's."""

    distance: Any
    tile: Any


@gluon.jit
def work_in(turn, shards, WORLD_SIZE: gl.constexpr):
    """Return what this program does in a turn."""
    PEERS: gl.constexpr = WORLD_SIZE - 1
    position = gl.program_id(0) + turn * gl.num_programs(0)
    if PEERS == 0:
        return Work(position * 0, position)
    else:
        # The first `lag` rounds have no own chunk, the last has all that are left.
        later = position - PEERS * shards.chunk * shards.lag
        round = gl.minimum(later // (WORLD_SIZE * shards.chunk), shards.last)
        is_early = later < 0
        chunk = gl.where(is_early, position // (PEERS * shards.chunk), shards.lag + round)
        within = gl.where(is_early, position % (PEERS * shards.chunk), later - round * WORLD_SIZE * shards.chunk)
        size = gl.where(is_early | (round < shards.last), shards.chunk, shards.last_chunk)
        is_own = within >= PEERS * size
        tile = gl.where(is_own, round * shards.chunk + within - PEERS * size, chunk * shards.chunk + within % size)
        return Work(gl.where(is_own, 0, within // size + 1), tile)


def cut_into_rounds(
    flags: Any, *, m: int, n: int, k: int, by_columns: bool, tiles: int, num_programs: int, world_size: int
) -> Shards:
    """Return the rounds of a shard of (m, n) of so many tiles, whose partials arrive at `flags`.

    Args:
        by_columns: whether shards lie beside each other; else one above the other.
    """
    # A round is shorter than a turn by about a chunk: own tiles take longer, and go round among the programs.
    chunk, lag = max(1, num_programs // (world_size + 1)), _LAG
    if tiles <= chunk * lag:  # all own tiles last
        chunk, lag = tiles, 0
    last = -(-tiles // chunk) - 1
    rows_apart, cols_apart = (0, n) if by_columns else (m, 0)
    last_chunk = tiles - last * chunk
    return Shards(flags, m, n, k, rows_apart, cols_apart, tiles, chunk, lag, last=last - lag, last_chunk=last_chunk)
