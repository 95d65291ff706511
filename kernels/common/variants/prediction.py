"""Parts that the predicted times of all families share: waves of tiles, and what communication they hide.

The prediction of a variant is a function in its family's `prediction.py`, named in its `Implementation`. A GEMM is
waves of tiles over the SMs (overlap_taxonomy/gemm_cost.py, and library_cost.py of the library's). The first wave has
nothing to send, the bytes of the last one leave when there is nothing left to multiply. A call takes the longer of the
work and the communication, and what neither hides; docs/design.md has the formulas and how far they are off.
"""

from __future__ import annotations

import functools

from overlap_taxonomy import Machine, Work
from overlap_taxonomy.gemm_cost import Gemm, fastest_tile, gemm, portable_tiles, stream_k_us, widest
from overlap_taxonomy.library_cost import library_gemm
from overlap_taxonomy.transfer_cost import collective_us
from overlap_taxonomy.work import WorkKind

from ..config import LEAST_CHUNK_BYTES
from ..hopper.plan import (
    BLOCK_M,
    COSTS,
    Promotion,
    Tiling,
    fastest_tiling,
    rates_of,
    split_tile_us,
    split_waves,
)

_PROMOTIONS = {"promoted": Promotion.WHOLE_SUMS, "block": Promotion.BLOCK_SUMS}


def in_sequence(machine: Machine, work: Work, sent: float, *, gbps: float = 0.0) -> float:
    """The library's GEMM, then its collective of `sent` bytes, at a rate as `collective_us` takes it."""
    return library_gemm(machine, work).us + collective_us(machine, work, sent, gbps=gbps) + machine.launch_us


def stream_k_call_us(machine: Machine, work: Work, m: int, n: int, k: int) -> float:
    """A stream-K GEMM, its early launch, and a trip to a peer."""
    us = stream_k_us(machine, m, n, k, work.element_bytes, work.sums)
    if work.reads_narrow_rows and not machine.has_descriptors(work.element_bytes):
        us *= machine.narrow_slowdown
    return us + machine.early_launch_us + (machine.hop_us if work.peers else 0.0)


def norm_us(machine: Machine, work: Work, *, is_fused: bool) -> float:
    """Norming rows: by a kernel that reads and stores them, or where they are added, which only stores more."""
    if not work.normed_share:
        return 0.0
    if is_fused:
        return work.normed_bytes / machine.sum_gbps / 1e3
    return machine.launch_us + 2 * work.normed_bytes / machine.memory_gbps / 1e3


def portable_gemm(
    machine: Machine,
    work: Work,
    m: int,
    n: int,
    k: int,
    *,
    sms: int = 0,
    shards: int = 1,
    most_columns: int = 256,
    come_apart: bool = False,
) -> Gemm:
    """A GEMM by the portable main loop, in the tiles that its plan has, of so many columns at most."""
    tiles, with_rows = portable_tiles(machine, widest(work.sums, "portable")), -(-m // -(-m // shards))
    tile_m, tile_n = fastest_tile(m, n, sms or machine.num_sms, tiles, with_rows)
    return gemm(
        machine, work, m, n, k, tile=(tile_m, min(tile_n, most_columns)), sms=sms, shards=shards, come_apart=come_apart
    )


def sm90_gemm(
    machine: Machine,
    work: Work,
    m: int,
    n: int,
    k: int,
    *,
    sms: int = 0,
    shards: int = 1,
    peers: int = 0,
    most_columns: int = 256,
    is_sent: bool = False,
    come_apart: bool = False,
) -> Gemm:
    """A GEMM by the sm90 main loop, in the tiles that its plan has; `is_sent` where these go to all peers.

    Only of those the last ones may be split.
    """
    rows = -(-m // (shards * BLOCK_M))  # of a shard's tiles, on which alone the tiling depends
    tiling = _sm90_tiling(work.kind, rows, n, k, machine.num_sms, shards, peers, is_sent)
    tile = BLOCK_M, min(tiling.block_n, most_columns)
    own = gemm(machine, work, m, n, k, tile=tile, sms=sms, kind="specialized", shards=shards, come_apart=come_apart)
    if tiling.splits == 1:
        return own
    last_us = split_us(machine, work, own, machine.sm90.exchange_us)
    return own._replace(last_us=last_us, wave_us=own.wave_us if own.waves > 1 else last_us)


def split_us(machine: Machine, work: Work, own: Gemm, exchange_us: float) -> float:
    """What the last tiles of the sm90 main loop take where two or more programs multiply each."""
    tiling = Tiling(own.tile_n, 2)
    parts = split_waves(tiling, own.last_tiles, _half_words(work, work.product[2]), num_programs=machine.num_sms)
    us = sum(split_tile_us(tiling, own.wave_us, splits, exchange_us) for _, splits in parts)
    # Where the memory binds, at the rate at which weights stream, half of the last fix-up is done while other operands
    # come.
    moved_us = own.moved_bytes / machine.stream_k.memory_gbps / 1e3 - (own.waves - 1) * own.wave_us
    return max(us, moved_us + split_tile_us(tiling, 0.0, parts[-1][1], exchange_us) / 2)


def _half_words(of: Work | WorkKind, k: int) -> int:
    return -(-k * of.element_bytes // 2)


@functools.lru_cache(maxsize=1024)
def _sm90_tiling(of: WorkKind, rows: int, n: int, k: int, sms: int, shards: int, peers: int, is_sent: bool) -> Tiling:
    return fastest_tiling(
        rows * shards * BLOCK_M,
        n,
        _half_words(of, k),
        num_programs=sms,
        peers=peers * of.out_bytes // 2,
        splits=(1, 2) if is_sent else (1,),
        shards=shards,
        pingpong=is_sent and of.sums not in _PROMOTIONS,
        widest=_widest(of),
        promotion=_promotion(of),
    )


def sm90_columns(work: Work) -> list[int]:
    """The widths of the sm90 main loop's tiles."""
    return [width for width in rates_of(_promotion(work)) if width <= _widest(work)]


def multiplied_us(work: Work, columns: int) -> float:
    """A tile of the sm90 main loop of so many columns beside copies, as plans count it."""
    promotion = _promotion(work)
    rates = COSTS.rates_beside_copies if promotion is Promotion.NONE else rates_of(promotion)
    return work.product[2] * work.element_bytes / 2 * 2e-6 * BLOCK_M * columns / (COSTS.sm_tflops * rates[columns])


def _widest(of: Work | WorkKind) -> int:
    return 128 if of.out_bytes > 2 else 256


def is_promoted(work: Work) -> bool:
    """Whether the sm90 main loop promotes sums, whose tiles are not split."""
    return _promotion(work) is not Promotion.NONE


def _promotion(of: Work | WorkKind) -> Promotion:
    return _PROMOTIONS.get(of.sums, Promotion.NONE)


def ends(machine: Machine, work: Work, *, kernels: int, waits: float = 1.0) -> float:
    """The handshake with peers, of which a call `waits` for that share, and the launches of so many kernels."""
    return (waits * machine.handshake_us if work.peers else 0.0) + kernels * machine.launch_us


def comm_sms(machine: Machine, share: float) -> int:
    """How many SMs are set apart for communication."""
    return max(1, round(machine.num_sms * share))


def num_chunks(part_bytes: float, *, most: int) -> int:
    """Into how many chunks a part of a matrix is cut for the copy engines."""
    return max(1, min(most, int(part_bytes) // LEAST_CHUNK_BYTES))


def sent_beside(own: Gemm, push: float) -> float:
    """Tiles leave while the next are multiplied: the first wave sends nothing, the last one's leave after it."""
    return max(own.us + push * own.last_share, own.wave_us + push)


def exposed(machine: Machine, own: Gemm) -> float:
    """The part of the stores that a program which stores its own tile cannot hide: all of it in the last wave."""
    return machine.stall_share + (1 - machine.stall_share) / own.waves
