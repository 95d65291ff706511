"""The parts of a predicted time: a rank's GEMM in waves of tiles, bytes over the link, the library's collectives."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from .machine import Machine, StreamK
from .registry import Partition, partition_of

LIBRARY_TILE_RATES = {
    (128, 192): 0.97,
    (256, 128): 1.0,
    (192, 128): 0.97,
    (64, 256): 0.85,
}  # that our kernels do not have
FP8_SUMS = ("promoted", "fast", "block")
LOW_ROWS = 64  # of a low tile, which is loaded in longer steps of k
WIDE_BYTES = 16  # of a row or more: what is read and stored at once, and what tensor descriptors need


@dataclass(frozen=True)
class Work:
    """A problem as the model sees it. Operands of one byte an element are fp8.

    Args:
        family: the kernel family, e.g. ``"gemm_all_scatter"``.
        m, n, k: sizes of the whole product, over all ranks.
        world_size: number of ranks.
        element_bytes: of an element of A and B.
        out_bytes: of an element of C and of partial sums; 0 for those of the operands'.
        normed_share: of C's rows, those that the rank with the most norms.
        sums: of fp8 products, "promoted" to fp32 every 128 of k, "fast" in the tensor cores' own accumulators, or of
            "block" scales; "" of other dtypes.

    Raises:
        ValueError: a size below one, or sums that there are not, or not of that dtype.
    """

    family: str
    m: int
    n: int
    k: int
    world_size: int
    element_bytes: int = 2
    out_bytes: int = 0
    normed_share: float = 0.0
    sums: str = ""

    def __post_init__(self) -> None:
        if not self.out_bytes:
            object.__setattr__(self, "out_bytes", self.element_bytes)
        for name in ("m", "n", "k", "world_size", "element_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it takes a positive integer")
        known = FP8_SUMS if self.element_bytes == 1 else ("",)
        if self.sums not in known:
            raise ValueError(
                f"sums are {self.sums!r}; with elements of {self.element_bytes} bytes they are one of {known}"
            )

    @functools.cached_property
    def partition(self) -> Partition:
        """How the family partitions the product."""
        return partition_of(self.family)

    @property
    def peers(self) -> int:
        """All ranks but one."""
        return self.world_size - 1

    def share(self, size: int) -> int:
        """Return the largest rank's shard of a size."""
        return -(-size // self.world_size)

    @property
    def normed_bytes(self) -> float:
        """Bytes of the rows that a rank norms."""
        return self.normed_share * self.m * self.n * self.element_bytes

    @property
    def product(self) -> tuple[int, int, int]:
        """M, N and K of the GEMM of the rank that has most to do."""
        n, k = (self.n, self.share(self.k)) if self.partition.sums else (self.share(self.n), self.k)
        return self.m, n, k

    def is_narrow(self, elements: int) -> bool:
        """Whether rows of so many elements are not on 16 bytes."""
        return elements * self.element_bytes % WIDE_BYTES != 0

    @property
    def has_narrow_output(self) -> bool:
        """Whether rows of C, and of partial sums, are not on 16 bytes."""
        return self.n * self.out_bytes % WIDE_BYTES != 0

    @functools.cached_property
    def reads_narrow_rows(self) -> bool:
        """Whether rows of A, and columns of B, are not on 16 bytes, on any rank."""
        if not self.partition.sums:
            return self.is_narrow(self.k)
        share = self.share(self.k)
        return any(self.is_narrow(max(0, min(share, self.k - rank * share))) for rank in range(self.world_size))


class Gemm(NamedTuple):
    """A rank's GEMM on some SMs.

    Args:
        tiles, waves: how many; SMs take a tile each in a wave.
        wave_us: of one wave.
        tile_n: columns of a tile.
        tile_bytes: of a finished tile.
        last_tiles: tiles of the last wave.
    """

    tiles: int
    waves: int
    wave_us: float
    tile_n: int
    tile_bytes: int
    last_tiles: int

    @property
    def us(self) -> float:
        """The whole."""
        return self.waves * self.wave_us

    @property
    def last_share(self) -> float:
        """The part of the output that is finished by the last wave."""
        return self.last_tiles / self.tiles


@functools.lru_cache(maxsize=1024)  # several variants have the same
def gemm(
    machine: Machine, work: Work, m: int, n: int, k: int, *, sms: int = 0, kind: str = "portable", shards: int = 1
) -> Gemm:
    """Return a rank's GEMM with the tile whose waves end first.

    Args:
        machine, work: where, and of what dtype.
        m, n, k: of the rank's own GEMM.
        sms: that multiply; 0 for all.
        kind: "library", "portable" (our kernels in Triton) or "specialized" (warps with roles).
        shards: parts of the rows, one multiplied after the other: each has tiles of its own, and reads a B that the
            L2 cache does not hold.
    """
    sms = sms or machine.num_sms
    slows_down, narrow_stores = _library_slows_down(work, m), stores_narrow_rows(machine, work)
    slowest = float("inf")
    tiles_of = _tiles(
        machine, work.element_bytes, work.sums, kind, sms, slows_down, work.reads_narrow_rows, narrow_stores
    )
    for tile_m, tile_n, multiply_us, read_us, stream_us, beside_us in tiles_of:
        tiles = min(shards, m) * -(-m // (shards * tile_m)) * -(-n // tile_n)
        waves = -(-tiles // sms)
        load_us = stream_us if m <= tile_m else read_us
        wave_us = k * (multiply_us if multiply_us > load_us else load_us) + beside_us
        if waves * wave_us < slowest:
            slowest, best = waves * wave_us, (tiles, waves, wave_us, tile_m, tile_n)
    tiles, waves, wave_us, tile_m, tile_n = best
    if work.element_bytes == 2:  # what exact fp32 draws was not measured; the rates of fp8 are those of long calls
        wave_us /= clock(machine, wave_us * waves)
    b_reads = min(shards, m, waves) if k * n * work.element_bytes > machine.l2_bytes else 1
    moved = work.element_bytes * (m * k + b_reads * k * n) + work.out_bytes * m * n
    floor_us = moved / machine.memory_gbps / 1e3
    wave_us, last_tiles = max(wave_us, floor_us / waves), tiles - (waves - 1) * sms
    if kind == "library" and not slows_down and work.element_bytes > 1:  # torch's fp8 kernels split no tiles
        split_us = stream_k_us(machine, m, n, k, work.element_bytes)
        if split_us < waves * wave_us:
            waves, wave_us, last_tiles = 1, split_us, tiles
    return Gemm(tiles, waves, wave_us, tile_n, tile_m * tile_n * work.out_bytes, last_tiles)


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
    """Return the columns of a main loop's widest tiles: 256 of two sums, as of fp8, fit no registers."""
    has_two_sums = sums == "promoted" if kind == "specialized" else bool(sums)
    return 128 if kind != "library" and has_two_sums else 256


class _Tile(NamedTuple):
    """A tile of (m, n), and what it takes beside its multiplication and loads, and these for each element along k."""

    m: int
    n: int
    multiply_us: float
    read_us: float
    stream_us: float
    beside_us: float


@functools.lru_cache(maxsize=256)
def _tiles(
    machine: Machine,
    element_bytes: int,
    sums: str,
    kind: str,
    sms: int,
    slows_down: bool,
    reads_narrow_rows: bool,
    stores_narrow_rows: bool,
) -> list[_Tile]:
    """Return the tiles that a GEMM on so many SMs can have; `slows_down` is of the library's."""
    is_portable, is_library = kind == "portable", kind == "library"
    tflops = peak_tflops(machine, element_bytes)  # while the GPU is cool
    most_columns, rates = widest(sums, kind), _tile_rates(machine, kind, slows_down=slows_down)
    if sums:
        tflops *= fp8_rate(machine, sums, kind) / rates.get((128, most_columns), 1.0)
    elif is_portable:
        tflops *= machine.portable_rate
    # With descriptors operands are copied first, to rows on 16 bytes: `aligned_us`.
    reads_narrow = reads_narrow_rows and not machine.has_descriptors(element_bytes)
    if is_library:
        tflops /= machine.library_narrow_slowdown if slows_down else 1.0
    elif reads_narrow:
        tflops /= machine.narrow_slowdown
    sm_flops_a_us = tflops * 1e6 / machine.num_sms * (machine.num_sms / sms) ** machine.spare_power
    full_tile_us = machine.narrow_tile_us if stores_narrow_rows else machine.portable_tile_us
    tiles = []
    for (tile_m, tile_n), rate in rates.items():
        if tile_n > most_columns:
            continue
        row_bytes = 0 if is_library and not sums else (tile_m + tile_n) * element_bytes
        tile = _Tile(
            tile_m,
            tile_n,
            multiply_us=2.0 * tile_m * tile_n / (sm_flops_a_us * rate),
            read_us=row_bytes / machine.stream_k.read_gbps / 1e3,
            stream_us=row_bytes / machine.stream_k.stream_gbps / 1e3,
            beside_us=full_tile_us * tile_m * tile_n / (128 * 256) if is_portable else machine.tile_us,
        )
        tiles.append(tile)
    return tiles


def _tile_rates(machine: Machine, kind: str, *, slows_down: bool) -> dict[tuple[int, int], float]:
    """Return the rates of the tiles that there are, of the best one's."""
    rates = {tile: rate for tile, rate in machine.tile_rates.items() if kind != "specialized" or tile[0] == 128}
    if kind != "library":
        return rates
    if slows_down:
        return {tile: rate**0.5 for tile, rate in rates.items()}  # what is slow is the same for small tiles
    return rates | LIBRARY_TILE_RATES


def _library_slows_down(work: Work, m: int) -> bool:
    """Whether rows off 16 bytes slow the library's GEMM; a single row has a kernel of its own, fp32 is not known."""
    return work.reads_narrow_rows and m > 1 and work.element_bytes <= 2


def clock(machine: Machine, us: float) -> float:
    """Return the clock's share of its highest, in calls of this length one after the other: power is limited."""
    return machine.hot_share + (1 - machine.hot_share) * math.exp(-us / (machine.warm_ms * 1e3))


@functools.lru_cache(maxsize=1024)
def stream_k_us(machine: Machine, m: int, n: int, k: int, element_bytes: int, sums: str = "") -> float:
    """Return the time of an (m, n) over k in whole waves, and a last one whose tiles programs split, by the best tile.

    It is that of the tiling that stream-K kernels choose, nearly, and takes a hundredth of the time to predict.
    """
    costs, sms = machine.stream_k, machine.num_sms
    rate = fp8_rate(machine, sums, "portable") if sums else 1.0
    low = 16 if m <= 16 else 32 if m <= 32 else LOW_ROWS

    def us(block_m: int, block_n: int) -> float:
        block_k = 128 if block_m <= LOW_ROWS else 64
        rows, steps = -(-m // block_m), -(-k // block_k)
        waves, left = divmod(rows * -(-n // block_n), sms)

        def wave_us(programs: int, splits: float) -> float:
            one_us = step_us(costs, block_m, block_n, block_k, rows, programs, element_bytes, rate)
            return steps / splits * one_us + costs.tile_us

        whole_us = waves * wave_us(sms, 1) if waves else 0.0
        if not left:
            return whole_us
        load_us = 4.0 * block_m * block_n / costs.load_gbps / 1e3
        alone_us = wave_us(left, 1)
        splits = max(1.0, min(sms / left, steps, math.sqrt(alone_us / load_us)))
        fixup_us = costs.fixup_us + store_partial_us(costs, block_m, block_n) + (splits - 1) * load_us
        return whole_us + min(alone_us, wave_us(round(left * splits), splits) + fixup_us)

    tiles = [tile for tile in costs.tile_rates if tile[1] <= widest(sums, "portable")]
    split_us = min(us(*tile) for tile in tiles if (tile[0] == low if m <= LOW_ROWS else tile[0] >= LOW_ROWS))
    if element_bytes > 2:
        return max(split_us, 2e-6 * m * n * k / machine.fp32_tflops)
    multiply_us = 2e-6 * m * n * k / (peak_tflops(machine, element_bytes) * rate)
    return max(split_us, multiply_us if sums else multiply_us / clock(machine, multiply_us))


_SLOWER = {1: 0.5, 2: 1.0, 4: 16.0}  # multiplication, by the bytes of an element


def step_us(
    costs: StreamK,
    block_m: int,
    block_n: int,
    block_k: int,
    rows: int,
    programs: int,
    element_bytes: int,
    rate: float = 1.0,
) -> float:
    """Return the time of a step of a tile, while so many `programs` compute; `rows` of tiles share B.

    `rate` is the main loop's, of that of the tensor cores.
    """
    rate *= max(costs.least_rate, costs.tile_rates.get((block_m, block_n), 0.0)) / _SLOWER[element_bytes]
    weight_bytes = block_n * block_k * element_bytes / rows  # read from memory once, then from the L2 cache
    stream_gbps = costs.low_stream_gbps if block_m < LOW_ROWS else costs.stream_gbps
    return max(
        (block_m + block_n) * block_k * element_bytes / (1e3 * (stream_gbps if rows == 1 else costs.read_gbps)),
        weight_bytes * programs / (1e3 * costs.memory_gbps),
        2.0 * block_m * block_n * block_k / (1e6 * costs.sm_tflops * rate),
    )


def store_partial_us(costs: StreamK, block_m: int, block_n: int) -> float:
    """Return the time until a program has stored its partial of a tile."""
    return costs.store_us + 4.0 * block_m * block_n / (1e3 * costs.store_gbps)


def push_us(
    machine: Machine, size: float, *, narrow: bool, sms: int = 0, chunk_bytes: int = 0, to_one: bool = False
) -> float:
    """Return the time in which SMs store so many bytes to peers.

    Args:
        machine: where.
        size: in bytes, to all peers together.
        narrow: whether rows are not on 16 bytes.
        sms: that send; 0 for all.
        chunk_bytes: after how many of them an SM waits for their arrival, to signal them; 0 for never.
        to_one: whether they go to one peer after the other.
    """
    sm_gbps = machine.sm_link_gbps
    if chunk_bytes:
        sm_gbps = chunk_bytes / (chunk_bytes / sm_gbps + machine.signal_us * 1e3)
    gbps = min(machine.peer_gbps if to_one else machine.link_gbps, (sms or machine.num_sms) * sm_gbps)
    return size / (gbps * (machine.narrow_link_gbps / machine.link_gbps if narrow else 1.0)) / 1e3


def stores_narrow_rows(machine: Machine, work: Work) -> bool:
    """Return whether kernels store rows off 16 bytes: with descriptors, those of partials and sums are longer."""
    is_longer = work.partition.sums and machine.has_descriptors(work.element_bytes)
    return work.has_narrow_output and not is_longer


def aligned_us(machine: Machine, work: Work, m: int, n: int, k: int) -> float:
    """Return the time in which a rank's operands (m, k) and (k, n), B by columns, are copied to rows on 16 bytes."""
    return 2 * (m + n) * k * work.element_bytes / machine.align_gbps / 1e3 + machine.launch_us


def copy_us(machine: Machine, size: float, row_bytes: int) -> float:
    """Return the time of one copy by a copy engine, the start of it included."""
    gbps = machine.engine_narrow_rows_gbps if row_bytes % 512 else machine.engine_gbps
    return size / gbps / 1e3 + machine.engine_us


def collective_us(machine: Machine, work: Work, size: float, *, gbps: float = 0.0) -> float:
    """Return the time of the library's collective.

    Args:
        machine, work: where, and among how many.
        size: what a rank sends, in bytes.
        gbps: its rate on large buffers; 0 for that of an all-gather.
    """
    large = size / (gbps or machine.collective_gbps) / 1e3 + machine.collective_us * work.peers
    small = size / machine.small_collective_gbps / 1e3 + machine.small_collective_us * work.peers
    return min(large, small)
