"""The predicted time of a rank's GEMM: waves of tiles, by main loop, and stream-K's."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .machine import Machine, StreamK
from .machines import H200X4
from .work import Work, WorkKind

LOW_ROWS = 64  # of a low tile, which is loaded in longer steps of k
PIECE_LINES = 32  # of an operand, that the specialized main loop loads at once where tiles reach past the end
ROWS_OF_MMA = 8  # of which tiles of the library's kernels have a multiple
STEP_BYTES = 128  # of a row, that a step of k loads
# The clock's share of its highest above which stream-K's main loop is no faster, as it waits for its loads: in short
# calls it multiplies as its constants say, which were fitted to many. Over two H200s a step of 128 x 256 x 64 took 0.65
# to 0.70 us in all-gathers of 256 to 2048 rows, of 47 us as of 1.3 ms; at the highest clock it would take 0.58.
MOST_CLOCK = H200X4.stream_k.sm_tflops * H200X4.num_sms / H200X4.boost_tflops
# The power by which multiplying and loading add up to more than the longer of them: with it the standard deviation of
# predictions of stream-K over two H200s, of 65 to 2048 rows, is 5.4 %, and 5.7 % where only the longer counts.
_SIDE_BY_SIDE = 8


class Gemm(NamedTuple):
    """A rank's GEMM on some SMs.

    Args:
        tiles, waves: how many; SMs take a tile each in a wave.
        wave_us: of one wave but the last.
        last_us: of the last wave.
        tile_m, tile_n: rows and columns of a tile.
        last_tiles: tiles of the last wave.
        moved_bytes: between the rank's own memory and all SMs.
    """

    tiles: int
    waves: int
    wave_us: float
    last_us: float
    tile_m: int
    tile_n: int
    last_tiles: int
    moved_bytes: int

    @property
    def us(self) -> float:
        """The whole."""
        return (self.waves - 1) * self.wave_us + self.last_us

    @property
    def last_share(self) -> float:
        """The part of the output that is finished by the last wave."""
        return self.last_tiles / self.tiles


def tiles_of(m: int, n: int, tile: tuple[int, int], shards: int = 1) -> int:
    """Return how many tiles an (m, n) has, cut into so many shards of rows, each with the tiles of the largest."""
    tile_m, tile_n = tile
    return shards * -(-m // (shards * tile_m)) * -(-n // tile_n)


@functools.lru_cache(maxsize=1024)
def fastest_tile(m: int, n: int, sms: int, tiles: Sequence[tuple[int, int]], shards: int = 1) -> tuple[int, int]:
    """Return the tile of the portable main loop whose waves end first, if multiplications alone take time on an H200.

    Args:
        m, n: what is cut into tiles.
        sms: that multiply.
        tiles: to choose from.
        shards: of the rows, that have any.
    """

    def us(tile: tuple[int, int]) -> float:
        return -(-tiles_of(m, n, tile, shards) // sms) * tile[0] * tile[1] / H200X4.tile_rates[tile]

    return min(tiles, key=us)


@functools.lru_cache(maxsize=64)
def portable_tiles(machine: Machine, most_columns: int) -> tuple[tuple[int, int], ...]:
    """Return the tiles of so many columns, at most, that plans of the portable main loop choose from."""
    return tuple(tile for tile in H200X4.tile_rates if tile in machine.tile_rates and tile[1] <= most_columns)


@functools.lru_cache(maxsize=1024)  # several variants have the same
def gemm(
    machine: Machine,
    work: Work,
    m: int,
    n: int,
    k: int,
    *,
    tile: tuple[int, int],
    sms: int = 0,
    kind: str = "portable",
    shards: int = 1,
    come_apart: bool = False,
) -> Gemm:
    """Return a rank's GEMM by one of our main loops.

    Args:
        machine, work: where, and of what dtype.
        m, n, k: of the rank's own GEMM.
        tile: rows and columns.
        sms: that multiply; 0 for all.
        kind: "portable" (in Triton) or "specialized" (warps with roles).
        shards: parts of the rows, one multiplied after the other: each has tiles of its own, and reads a B that the
            L2 cache does not hold. Those of one wave read it together.
        come_apart: whether some shards wait for their rows while others are multiplied: then those of one wave, too,
            read what of B the L2 cache does not hold.
    """
    sms = sms or machine.num_sms
    costs = _tile_costs(machine, work.kind, kind, sms, tile)
    tile_m, tile_n = tile
    tiles, shard_rows = tiles_of(m, n, tile, shards), -(-m // shards)
    waves = -(-tiles // sms)
    last_tiles = tiles - (waves - 1) * sms
    rows = -(-shard_rows // tile_m)  # of a shard's tiles
    beyond = rows * tile_m - shard_rows
    if kind == "specialized":  # what is loaded in place of a piece wholly beyond has all its rows, where some piece has
        beyond = beyond % PIECE_LINES * (1 if shard_rows > PIECE_LINES else tile_m // PIECE_LINES)
    beyond_share = -(-waves // rows) / waves  # of a program's tiles, those with rows beyond the shard

    multiply_us, load_us = costs.multiply_us, costs.load_us
    if work.element_bytes == 2:  # what exact fp32 draws was not measured; the rates of fp8 are those of long calls
        multiply_us /= clock(machine, waves * (k * max(multiply_us, load_us) + costs.beside_us))

    def wave_us(active: int) -> float:
        multiplied_us = multiply_us * (active / sms) ** machine.spare_power
        whole_us = max(multiplied_us, load_us)
        if beyond:
            loaded_us = load_us + active / rows * beyond * costs.beyond_us
            whole_us += beyond_share * max(0.0, loaded_us - whole_us)
        return k * whole_us + costs.beside_us

    last_us = wave_us(last_tiles)
    first_us = wave_us(sms) if waves > 1 else last_us
    b_bytes, others = work.element_bytes * k * n, min(shards, m) - 1
    read_again = min(others, waves - 1) * b_bytes if b_bytes > machine.l2_bytes else 0
    if come_apart:
        read_again = max(read_again, others * (b_bytes - machine.l2_bytes))
    moved = work.element_bytes * m * k + b_bytes + read_again + work.out_bytes * m * n
    longer = max(1.0, moved / machine.memory_gbps / 1e3 / ((waves - 1) * first_us + last_us))
    return Gemm(tiles, waves, first_us * longer, last_us * longer, tile_m, tile_n, last_tiles, moved)


def peak_tflops(machine: Machine, element_bytes: int) -> float:
    """Return the rate of a GEMM of operands of so many bytes; of fp8 twice bf16's in calls of any length.

    The power limit lowers the clock for bf16 alone: fp8 at this rate stays below it.
    """
    if element_bytes > 2:
        return machine.fp32_tflops
    return machine.boost_tflops if element_bytes == 2 else 2 * machine.boost_tflops * machine.hot_share


def fp8_rate(machine: Machine, sums: str, kind: str) -> float:
    """Return how fast a main loop of that `kind` multiplies fp8 in its widest tiles, of `peak_tflops`."""
    rates = {"library": machine.fp8_library_rates, "specialized": machine.fp8_sm90_rates}
    return rates.get(kind, machine.fp8_portable_rates)[sums]


def widest(sums: str, kind: str) -> int:
    """Return the columns of one of our main loops' widest tiles: 256 of two sums, as of fp8, fit no registers."""
    has_two_sums = sums == "promoted" or (sums == "block" and kind == "portable")
    return 128 if has_two_sums else 256


class _TileCosts(NamedTuple):
    """What a tile takes, in µs.

    Args:
        multiply_us, load_us: for each element along k.
        beyond_us: of `load_us`, for a row beyond the matrix and a program that loads beside this one.
        beside_us: beside these.
    """

    multiply_us: float
    load_us: float
    beyond_us: float
    beside_us: float


@functools.lru_cache(maxsize=1024)
def _tile_costs(machine: Machine, of: WorkKind, kind: str, sms: int, tile: tuple[int, int]) -> _TileCosts:
    """Return what a tile of one of our main loops takes on so many SMs."""
    is_portable, element_bytes = kind == "portable", of.element_bytes
    tflops = peak_tflops(machine, element_bytes)  # while the GPU is cool
    rates = _rates(machine, of.sums, kind)
    if of.sums:
        tflops *= fp8_rate(machine, of.sums, kind) / rates.get((128, widest(of.sums, kind)), 1.0)
    elif is_portable:
        tflops *= machine.portable_rate
    # With descriptors operands are copied first, to rows on 16 bytes: `aligned_us`.
    has_descriptors = machine.has_descriptors(element_bytes)
    if of.reads_narrow_rows and not has_descriptors:
        tflops /= machine.narrow_slowdown
    sm_flops_a_us = tflops * 1e6 / machine.num_sms * (machine.num_sms / sms) ** machine.spare_power
    tile_m, tile_n = tile
    load_us = (tile_m + tile_n) * element_bytes / machine.stream_k.stream_gbps / 1e3
    if is_portable:
        load_us += machine.portable_step_us * element_bytes / STEP_BYTES
    full_tile_us = machine.narrow_tile_us if stores_narrow_rows(machine, of) else machine.portable_tile_us
    return _TileCosts(
        multiply_us=2.0 * tile_m * tile_n / (sm_flops_a_us * rates[tile]),
        load_us=load_us,
        beyond_us=element_bytes / machine.stream_k.memory_gbps / 1e3 if has_descriptors else 0.0,
        beside_us=full_tile_us * tile_m * tile_n / (128 * 256) if is_portable else machine.tile_us,
    )


def _rates(machine: Machine, sums: str, kind: str) -> dict[tuple[int, int], float]:
    """Return the rates of one of our main loops' tiles, of the best one's."""
    if kind == "specialized":
        sm90 = machine.sm90
        rates = {"promoted": sm90.promoted_rates, "block": sm90.block_rates}.get(sums, sm90.rates)
        return {(128, columns): rate for columns, rate in rates.items()}
    return dict(machine.tile_rates)


def clock(machine: Machine, us: float) -> float:
    """Return the clock's share of its highest, in calls of this length one after the other: power is limited."""
    return machine.hot_share + (1 - machine.hot_share) * math.exp(-us / (machine.warm_ms * 1e3))


@functools.lru_cache(maxsize=1024)
def stream_k_us(
    machine: Machine,
    m: int,
    n: int,
    k: int,
    element_bytes: int,
    sums: str = "",
    *,
    fits_rows: bool = False,
    most_us: float = math.inf,
) -> float:
    """Return the time of an (m, n) over k in whole waves, and a last one whose tiles programs split, by the best tile.

    It is that of the tiling that stream-K kernels choose, nearly, and takes a hundredth of the time to predict. With
    `fits_rows` tiles have as few rows as do, of multiples of `ROWS_OF_MMA`, and multiply at any clock: the library has
    such kernels. Where it is no less than `most_us`, it is not computed, and `most_us` or more is returned.
    """
    costs, sms = machine.stream_k, machine.num_sms
    rate = fp8_rate(machine, sums, "portable") if sums else 1.0
    tflops = peak_tflops(machine, element_bytes)
    multiplied_us = 2e-6 * m * n * k / (tflops * rate)
    if element_bytes == 2:
        highest = 1.0 if fits_rows else MOST_CLOCK
        rate *= tflops / sms / costs.sm_tflops * min(highest, clock(machine, multiplied_us))
    has_beyond = machine.has_descriptors(element_bytes) and not fits_rows

    def us(tile: _SplitTile, rows: int, steps: int, waves: int, left: int, multiply_us: float, load_us: float) -> float:
        line_us = tile.line_us / rows
        weights_us, beyond_us = tile.block_n * line_us, (rows * tile.block_m - m) * line_us if has_beyond else 0.0

        def wave_us(programs: float, splits: float) -> float:
            moved_us = max(load_us + beyond_us * programs, weights_us * programs)
            one_us = max(multiply_us, moved_us) if fits_rows else _beside(multiply_us, moved_us)
            return steps / splits * one_us + costs.tile_us

        whole_us = waves * wave_us(sms, 1) if waves else 0.0
        if not left:
            return whole_us
        add_us, store_us = tile.add_us, tile.store_us
        unsplit_us = wave_us(left, 1)
        most = max(1.0, min(sms / left, steps, math.sqrt(unsplit_us / add_us)))
        even = int(most)
        even_us = wave_us(left * even, even) + store_us * (1 - 1 / even) + costs.fixup_us + (even - 1) * add_us
        # Programs with parts of two tiles begin another one, and store a partial before it.
        other_us = costs.tile_us / most + store_us + costs.uneven_fixup_us + most * add_us
        return whole_us + min(unsplit_us, even_us, wave_us(left * most, most) + other_us)

    low = 16 if m <= 16 else 32 if m <= 32 else LOW_ROWS
    split_us, fixup_us = most_us, min(costs.fixup_us, costs.uneven_fixup_us)
    for tile in _split_tiles(machine, element_bytes, sums, low, is_low=m <= LOW_ROWS):
        rows, steps = -(-m // tile.block_m), -(-k // tile.block_k)
        waves, left = divmod(rows * -(-n // tile.block_n), sms)
        multiply_us, load_us = tile.multiply_us / rate, tile.load_us if rows == 1 else tile.read_us
        if fits_rows:
            multiply_us *= min(1.0, ROWS_OF_MMA * -(-m // (rows * ROWS_OF_MMA)) / tile.block_m)
        # Of a tile that would not end first if nothing but splitting held it up, the time is not computed.
        whole_us = steps * (multiply_us if multiply_us > load_us else load_us)
        least_us = waves * (whole_us + costs.tile_us)
        if left:
            least_us += costs.tile_us + min(whole_us, whole_us * left / sms + fixup_us)
        if least_us < split_us:
            split_us = min(split_us, us(tile, rows, steps, waves, left, multiply_us, load_us))
    return max(split_us, multiplied_us) if element_bytes > 2 or sums else split_us


def _beside(one_us: float, other_us: float) -> float:
    """Return how long two things take that run side by side, where each holds the other up as they near each other."""
    longer, shorter = (one_us, other_us) if one_us > other_us else (other_us, one_us)
    return longer * (1.0 + (shorter / longer) ** _SIDE_BY_SIDE) ** (1.0 / _SIDE_BY_SIDE)


class _SplitTile(NamedTuple):
    """What a tile takes that programs may split, in µs: of a step at the tensor cores' rate, then of its partial sum.

    Args:
        block_m, block_n, block_k: of a step.
        multiply_us, load_us, line_us: as `_step` has them, for one row of tiles.
        read_us: `load_us` for several.
        add_us, store_us: of a partial sum.
    """

    block_m: int
    block_n: int
    block_k: int
    multiply_us: float
    load_us: float
    read_us: float
    line_us: float
    add_us: float
    store_us: float


@functools.lru_cache(maxsize=64)
def _split_tiles(machine: Machine, element_bytes: int, sums: str, low: int, *, is_low: bool) -> list[_SplitTile]:
    """Return the tiles of stream-K: those of `low` rows where the matrix `is_low`, else of `LOW_ROWS` or more."""
    costs, found = machine.stream_k, []
    for block_m, block_n in costs.tile_rates:
        if block_n <= widest(sums, "portable") and (block_m == low if is_low else block_m >= LOW_ROWS):
            block_k = 128 if block_m <= LOW_ROWS else 64
            multiply_us, load_us, line_us = _step(costs, block_m, block_n, block_k, 1, element_bytes)
            _, read_us, _ = _step(costs, block_m, block_n, block_k, 2, element_bytes)
            add_us = 4.0 * block_m * block_n / costs.load_gbps / 1e3
            store_us = store_partial_us(costs, block_m, block_n)
            of_step = multiply_us, load_us, read_us, line_us
            found.append(_SplitTile(block_m, block_n, block_k, *of_step, add_us, store_us))
    return found


_SLOWER = {1: 0.5, 2: 1.0, 4: 16.0}  # multiplication, by the bytes of an element


def step_us(
    costs: StreamK, block_m: int, block_n: int, block_k: int, rows: int, programs: int, element_bytes: int
) -> float:
    """Return the time of a step of a tile, while so many `programs` compute; `rows` of tiles share B."""
    multiply_us, load_us, line_us = _step(costs, block_m, block_n, block_k, rows, element_bytes)
    return max(multiply_us, load_us, block_n * line_us * programs)


def _step(
    costs: StreamK, block_m: int, block_n: int, block_k: int, rows: int, element_bytes: int
) -> tuple[float, float, float]:
    """Return the times of a step: of a tile's multiplications, of its loads, and of reading one row from memory.

    The last is for each program that computes at the same time: of `rows` tiles below each other one reads, and the
    others find what it read in the L2 cache.
    """
    rate = max(costs.least_rate, costs.tile_rates.get((block_m, block_n), 0.0)) / _SLOWER[element_bytes]
    multiply_us = 2.0 * block_m * block_n * block_k / (1e6 * costs.sm_tflops * rate)
    line_bytes = block_k * element_bytes
    stream_gbps = costs.low_stream_gbps if block_m < LOW_ROWS else costs.stream_gbps
    load_us = (block_m + block_n) * line_bytes / (1e3 * (stream_gbps if rows == 1 else costs.read_gbps))
    return multiply_us, load_us, line_bytes / rows / (1e3 * costs.memory_gbps)


def store_partial_us(costs: StreamK, block_m: int, block_n: int) -> float:
    """Return the time until a program has stored its partial of a tile."""
    return costs.store_us + 4.0 * block_m * block_n / (1e3 * costs.store_gbps)


def stores_narrow_rows(machine: Machine, of: WorkKind) -> bool:
    """Return whether kernels store rows off 16 bytes: with descriptors, those of partials and sums are longer."""
    return of.has_narrow_output and not (of.is_summed and machine.has_descriptors(of.element_bytes))
