"""Predicted times of all-gather + GEMM, shards of A to every peer: a function a variant."""

from __future__ import annotations

from collections.abc import Callable

from overlap_taxonomy import Machine, Work
from overlap_taxonomy.gemm_cost import Gemm, gemm, tiles_of
from overlap_taxonomy.library_cost import library_gemm
from overlap_taxonomy.transfer_cost import collective_us, copy_us, push_us

from ..common.hopper.plan import BLOCK_M
from ..common.variants.prediction import (
    comm_sms,
    ends,
    in_sequence,
    is_promoted,
    multiplied_us,
    portable_gemm,
    sm90_columns,
    sm90_gemm,
    split_us,
    stream_k_call_us,
)


def library(machine: Machine, work: Work) -> float:
    """An all-gather, and of fp8 one of scales, then the GEMM."""
    us = in_sequence(machine, work, work.peers * _shard_bytes(work))
    return us + (collective_us(machine, work, 0) + machine.launch_us if work.sums and work.peers else 0.0)


def bulk_synchronous(machine: Machine, work: Work) -> float:
    """All SMs push the shard, then the GEMM."""
    own = portable_gemm(machine, work, *work.product, shards=work.world_size)
    return own.us + _push_us(machine, work) + ends(machine, work, kernels=2)


def bulk_synchronous_library(machine: Machine, work: Work) -> float:
    """The same, with the library's GEMM."""
    own = library_gemm(machine, work)
    return own.us + _push_us(machine, work) + ends(machine, work, kernels=2)


def comm_programs(machine: Machine, work: Work, *, comm_share: float, most_columns: int = 256) -> float:
    """Some SMs push the shard, `comm_share` of all; the others multiply each when it has come."""
    sms, at_once = comm_sms(machine, comm_share), machine.is_fully_connected
    size = _shard_bytes(work) * (work.peers if at_once else 1)
    arrival = push_us(machine, size, narrow=work.is_narrow(work.k), sms=sms, to_one=not at_once)
    own = _own(machine, work, sms=machine.num_sms - sms, most_columns=most_columns)
    us = _as_shards_come(own.waves, own.us, own.wave_us, work, arrival, at_once=at_once)
    return us + ends(machine, work, kernels=1)


def workgroup_specialized_sm90(machine: Machine, work: Work, *, num_comm_programs: Callable[[int], int]) -> float:
    """The same by TMA, in tiles of 128 columns, with as many comm programs as its plan has for a shard of such bytes.

    The last tiles' rows come last.
    """
    sms = num_comm_programs(_shard_bytes(work)) if work.peers else 0
    most_columns = 128 if work.peers else 256
    own = sm90_gemm(
        machine,
        work,
        *work.product,
        sms=machine.num_sms - sms,
        shards=work.world_size,
        most_columns=most_columns,
        come_apart=True,
    )
    if not work.peers:
        return own.us + ends(machine, work, kernels=1)
    push = push_us(machine, work.peers * _shard_bytes(work), narrow=False, sms=sms, by_tma=True)
    return max(own.us, push + own.wave_us) + ends(machine, work, kernels=1)


def copy_engine(machine: Machine, work: Work) -> float:
    """The copy engines push the shard; each is multiplied when it has come."""
    return _beside_copies(machine, work, _own(machine, work))


def copy_engine_library(machine: Machine, work: Work) -> float:
    """The same, by the library: the own shard, then those behind it and those before it, of the rank in the middle."""
    arrival, at_once = _copied_us(machine, work), machine.is_fully_connected
    shard, behind = work.share(work.m), work.peers - work.peers // 2
    end, come = 0.0, 0
    for shards in (1, behind, work.peers - behind):
        if shards:
            arrived = (bool(come) if at_once else come + shards - 1) * arrival
            rows = min(shards * shard, work.m)
            end = max(end, arrived) + library_gemm(machine, work.with_rows(rows)).us
            end += (2 if come else 1) * machine.launch_us  # what awaits copies, and the product
            come += shards
    return end + ends(machine, work, kernels=1)


def copy_engine_sm90(machine: Machine, work: Work) -> float:
    """The same, by the sm90 main loop, in the tiles that end first if multiplications alone take time: its plan's."""
    arrival = _copied_us(machine, work)

    def planned_us(columns: int) -> float:
        tiles = tiles_of(*work.product[:2], (BLOCK_M, columns), work.world_size)
        waves, tile_us = -(-tiles // machine.num_sms), multiplied_us(work, columns)
        return _as_shards_come(waves, waves * tile_us, tile_us, work, arrival, at_once=machine.is_fully_connected)

    tile = BLOCK_M, min(sm90_columns(work), key=planned_us)
    own = gemm(machine, work, *work.product, tile=tile, kind="specialized", shards=work.world_size, come_apart=True)
    if own.waves > work.world_size and not is_promoted(work):
        last_us = split_us(machine, work, own, machine.sm90.exchange_beside_copies_us)
        own = own._replace(last_us=min(own.last_us, last_us))
    return _beside_copies(machine, work, own)


def _beside_copies(machine: Machine, work: Work, own: Gemm) -> float:
    arrival, at_once = _copied_us(machine, work), machine.is_fully_connected
    us = _as_shards_come(own.waves, own.us, own.wave_us, work, arrival, at_once=at_once)
    return us + ends(machine, work, kernels=1)


def _copied_us(machine: Machine, work: Work) -> float:
    row_bytes = work.k * work.element_bytes if work.reads_narrow_rows else 512  # others are contiguous
    return copy_us(machine, _shard_bytes(work), row_bytes)


def fused_sequential_stream_k(machine: Machine, work: Work) -> float:
    """All of A comes; then all SMs read weights."""
    return stream_k_call_us(machine, work, work.m, work.share(work.n), work.k) + _push_us(machine, work)


def _own(machine: Machine, work: Work, *, sms: int = 0, most_columns: int = 256) -> Gemm:
    ranks = work.world_size
    return portable_gemm(
        machine, work, *work.product, sms=sms, shards=ranks, most_columns=most_columns, come_apart=True
    )


def _shard_bytes(work: Work) -> int:
    return work.share(work.m) * work.k * work.element_bytes


def _push_us(machine: Machine, work: Work) -> float:
    return push_us(machine, work.peers * _shard_bytes(work), narrow=work.is_narrow(work.k))


def _as_shards_come(waves: int, us: float, wave_us: float, work: Work, arrival_us: float, *, at_once: bool) -> float:
    """Shards are multiplied in the order of their arrival, the own one first; SMs wait for what has not come.

    Args:
        waves, us, wave_us: of the GEMM, as a `Gemm` has them.
        work: what is multiplied.
        arrival_us: from one shard to the next, or of all.
        at_once: whether all come at the same time.
    """
    shard_waves, shard_us = -(-waves // work.world_size), us / work.world_size
    if at_once and work.peers:
        return max(shard_us, arrival_us) + max(work.peers * shard_us, shard_waves * wave_us)
    end = 0.0
    for distance in range(work.world_size):
        end = max(end + shard_us, distance * arrival_us + (shard_waves * wave_us if distance else 0))
    return end
