"""A model of how long a rank's tiles take, and the tiling and split of the last wave that it predicts to be fastest."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product

from overlap_taxonomy.gemm_cost import tiles_of
from overlap_taxonomy.machines import H200X4

BLOCK_M = 128
STEP_K = 64  # of operands of two bytes, as which all are counted here
ROW_BYTES = 128  # the widest row of a swizzled tile in shared memory
SUBTILE_ROWS = 32  # of default configurations; a program of a split tile keeps one or more
COSTS = H200X4.sm90  # by which tilings are chosen, on every GPU
# Within these bounds pingpong gained 0 to 7 % of ten all-scatters over 2 H200s, 2 % in the mean. Beyond the first it
# lost 6 %, beyond the second it gained nothing in the mean, beyond the third it was not measured.
_PINGPONG_MOST_US = 1000.0
_PINGPONG_MOST_K = 8192
_PINGPONG_MOST_SENT = 0.5  # of that time in which the link is busy: a tile's subtiles leave later
PINGPONG_COLUMNS = 128  # more would not fit the registers of a warp group
# Split tiles of 256 columns took 2 % more in the mean than was predicted for all-scatters over two H200s that send as
# four do, to split tiles that take less time lost, and split tiles of 64 columns were not measured.
_SPLIT_COLUMNS = 128
_SPLIT_LEAST_TILE_US = 45.0


class Promotion(Enum):
    """Which sums of fp8 products are promoted (promotion.py)."""

    NONE = "none"
    WHOLE_SUMS = "sums that are scaled when they are complete"
    BLOCK_SUMS = "sums over blocks of k with scales of their own"


@dataclass(frozen=True)
class Tiling:
    """How a matrix is cut into tiles, and how these are multiplied.

    Args:
        block_n: the width of tiles.
        splits: how many programs split each tile of the last wave.
        pingpong: whether warp groups multiply in turns.
        promotion: which sums are promoted.
    """

    block_n: int
    splits: int
    pingpong: bool = False
    promotion: Promotion = Promotion.NONE


def predicted_us(tiling: Tiling, m: int, n: int, k: int, *, num_programs: int, peers: int, shards: int = 1) -> float:
    """Return how long a rank takes for an (m, n) of inner size k, in µs, with what it sends at last.

    All programs end a wave at once. What they then have is sent during the next wave, which cannot end before, or after
    the last one.

    Args:
        tiling: the tiles, and how the last ones are split.
        m, n, k: of the rank's multiplication.
        num_programs: that compute.
        peers: how many ranks each tile is sent to.
        shards: of the rows, each with tiles of its own.
    """
    tiles = tiles_of(m, n, (BLOCK_M, tiling.block_n), shards)
    tile_us, sent_us = tile_alone_us(tiling, k), tile_sent_us(tiling, peers)
    whole = whole_waves(tiles, num_programs)
    multiplied = sent = 0.0  # when the wave before is, and when its tiles are
    if whole:
        multiplied = tile_us + (whole - 1) * max(tile_us, num_programs * sent_us)
        sent = multiplied + num_programs * sent_us
    for finished, splits in split_waves(tiling, tiles - whole * num_programs, k, num_programs=num_programs):
        wave_us = split_tile_us(tiling, tile_us, splits, COSTS.exchange_us)
        multiplied = max(multiplied + wave_us, sent)
        sent = multiplied + finished * sent_us
    return sent


def rates_of(promotion: Promotion) -> Mapping[int, float]:
    """Return how fast tiles multiply, by their columns: those that the main loop has with such a promotion."""
    if promotion is Promotion.BLOCK_SUMS:
        return COSTS.block_rates
    return COSTS.promoted_rates if promotion is Promotion.WHOLE_SUMS else COSTS.rates


def tile_alone_us(tiling: Tiling, k: int) -> float:
    """Return how long a program takes for a tile by itself."""
    beside_us = COSTS.pingpong_tile_us if tiling.pingpong else COSTS.tile_us
    tflops = COSTS.sm_tflops * rates_of(tiling.promotion)[tiling.block_n]
    return 2e-6 * BLOCK_M * tiling.block_n * k / tflops + beside_us


def split_tile_us(tiling: Tiling, tile_us: float, splits: int, exchange_us: float) -> float:
    """Return how long `splits` programs take for a tile, where the fix-up of 128 columns takes `exchange_us`."""
    return tile_us / splits + (exchange_us * tiling.block_n / 128 if splits > 1 else 0.0)


def whole_waves(num_tiles: int, num_programs: int) -> int:
    """Return how many waves all programs have before the last one, which some or all of them have."""
    return max(-(-num_tiles // num_programs) - 1, 0)


def split_waves(tiling: Tiling, left: int, k: int, *, num_programs: int) -> list[tuple[int, int]]:
    """Return how many tiles there are in each wave after the whole ones, and how few programs split one of them.

    `left` are the tiles of all these waves, 0 to `num_programs`. See tile_scheduler.py.
    """
    if tiling.splits == 1:
        return [(left, 1)] if left else []
    groups = num_programs // tiling.splits
    waves = [(groups, tiling.splits)] * (left // groups)
    if left_over := left % groups:
        most = min(num_subtiles(tiling.block_n, SUBTILE_ROWS), -(-k // STEP_K))
        waves.append((left_over, min(num_programs // left_over, most)))
    return waves


def tile_sent_us(tiling: Tiling, peers: int) -> float:
    """Return how long the link takes for a tile of one program."""
    return 2e-3 * BLOCK_M * tiling.block_n * peers / COSTS.store_gbps


def fastest_tiling(
    m: int,
    n: int,
    k: int,
    *,
    num_programs: int,
    peers: int,
    splits: tuple[int, ...],
    shards: int = 1,
    pingpong: bool = False,
    widest: int = 256,
    promotion: Promotion = Promotion.NONE,
) -> Tiling:
    """Return the tiling that is predicted to end first; see `predicted_us`.

    Args:
        m, n, k, num_programs, peers, shards: as `predicted_us` has them.
        splits: into how many the last tiles may be split; promoted sums are not.
        pingpong: whether warp groups may multiply in turns, where that was seen to be faster.
        widest: columns of a tile at most.
        promotion: which sums are promoted.
    """

    def us(tiling: Tiling) -> float:
        return predicted_us(tiling, m, n, k, num_programs=num_programs, peers=peers, shards=shards)

    best, best_us = None, math.inf
    for tiling in possible_tilings(k, num_programs=num_programs, splits=splits, widest=widest, promotion=promotion):
        can_gain = tiling.splits == 1 or (
            tiling.block_n == _SPLIT_COLUMNS and tile_alone_us(tiling, k) >= _SPLIT_LEAST_TILE_US
        )
        # No split for nothing: tilings without come first.
        if can_gain and (tiling_us := round(us(tiling), 1)) < best_us:
            best, best_us = tiling, tiling_us
    assert best is not None
    tiles = tiles_of(m, n, (BLOCK_M, PINGPONG_COLUMNS), shards)
    if not pingpong or peers != 1 or k > _PINGPONG_MOST_K or tiles <= num_programs:
        return best
    in_turns = Tiling(PINGPONG_COLUMNS, 1, pingpong=True)
    in_turns_us = us(in_turns)
    is_measured = tiles * tile_sent_us(in_turns, peers) < _PINGPONG_MOST_SENT * in_turns_us
    return in_turns if is_measured and in_turns_us < min(us(best), _PINGPONG_MOST_US) else best


def possible_tilings(
    k: int,
    *,
    num_programs: int,
    splits: tuple[int, ...],
    widest: int = 256,
    promotion: Promotion = Promotion.NONE,
) -> list[Tiling]:
    """Return the tilings whose last tiles are split so, for an inner size; neither narrow tiles nor promoted sums are.

    Those that are not split come first.

    Args:
        k: the inner size.
        num_programs: that compute.
        splits: into how many the last tiles may be split.
        widest: columns of a tile at most.
        promotion: which sums are promoted.
    """
    tilings = _tilings(splits, widest, promotion)
    return [
        tiling for tiling in tilings if tiling.splits == 1 or (tiling.splits < num_programs and is_possible(tiling, k))
    ]


@functools.lru_cache
def _tilings(splits: tuple[int, ...], widest: int, promotion: Promotion) -> list[Tiling]:
    return [
        Tiling(block_n, count, promotion=promotion)
        for count, block_n in product(sorted(splits), rates_of(promotion))
        if block_n <= widest and (count == 1 or (block_n >= _SPLIT_COLUMNS and promotion is Promotion.NONE))
    ]


def is_possible(tiling: Tiling, k: int) -> bool:
    """Whether each program of a split tile has a subtile to keep and a step of k to multiply."""
    return tiling.splits == 1 or (
        tiling.splits <= num_subtiles(tiling.block_n, SUBTILE_ROWS) and k >= tiling.splits * STEP_K
    )


def num_subtiles(block_n: int, rows: int, itemsize: int = 2) -> int:
    """Return how many subtiles of so many rows a tile has, of elements of so many bytes."""
    return BLOCK_M // rows * (block_n * itemsize // ROW_BYTES)
