"""Predicted times of all-gather + GEMM, shards of A to every peer: a function a variant."""

from __future__ import annotations

from overlap_taxonomy import Machine, Work
from overlap_taxonomy.cost import Gemm, collective_us, copy_us, gemm, push_us

from ..common.variants.prediction import comm_sms, ends, in_sequence, rows_in_tiles, stream_k_call_us

_CHUNKS = 8  # of a tile's operands, awaited one after the other
_GATED_RATE = 0.75  # how fast tiles are multiplied whose chunks are awaited, and narrower than others


def library(machine: Machine, work: Work) -> float:
    """An all-gather, and of fp8 one of scales, then the GEMM."""
    us = in_sequence(machine, _own(machine, work, kind="library"), work, work.peers * _shard_bytes(work))
    return us + (collective_us(machine, work, 0) + machine.launch_us if work.sums and work.peers else 0.0)


def bulk_synchronous(machine: Machine, work: Work) -> float:
    """All SMs push the shard, then the GEMM."""
    return _own(machine, work).us + _push_us(machine, work) + ends(machine, work, kernels=2)


def comm_programs(machine: Machine, work: Work, *, comm_share: float) -> float:
    """Some SMs push the shard, `comm_share` of all; the others multiply each when it has come."""
    sms = comm_sms(machine, comm_share)
    arrival = push_us(machine, _shard_bytes(work), narrow=work.is_narrow(work.k), sms=sms, to_one=True)
    own = _own(machine, work, sms=machine.num_sms - sms)
    return _as_shards_come(own, work, arrival) + ends(machine, work, kernels=1)


def workgroup_specialized_sm90(machine: Machine, work: Work, *, comm_share: float) -> float:
    """The same by TMA; a tile waits for chunks of its operands."""
    sms = comm_sms(machine, comm_share) if work.peers else 0
    rows = rows_in_tiles(work)
    own = gemm(
        machine,
        work,
        rows,
        work.share(work.n),
        work.k,
        sms=machine.num_sms - sms,
        kind="specialized",
        shards=work.world_size,
    )
    if not work.peers:
        return own.us + ends(machine, work, kernels=1)
    push = push_us(machine, work.peers * _shard_bytes(work), narrow=False, sms=sms)
    return max(own.us / _GATED_RATE, push + own.wave_us / _CHUNKS) + ends(machine, work, kernels=1)


def copy_engine(machine: Machine, work: Work, *, kind: str = "portable") -> float:
    """The copy engines push the shard; each is multiplied when it has come, by the main loop of that `kind`."""
    own = _own(machine, work, kind=kind)
    row_bytes = work.k * work.element_bytes if work.reads_narrow_rows else 512  # others are contiguous
    return _as_shards_come(own, work, copy_us(machine, _shard_bytes(work), row_bytes)) + ends(machine, work, kernels=1)


def fused_sequential_stream_k(machine: Machine, work: Work) -> float:
    """All of A comes; then all SMs read weights."""
    return stream_k_call_us(machine, work, work.m, work.share(work.n), work.k) + _push_us(machine, work)


def _own(machine: Machine, work: Work, *, sms: int = 0, kind: str = "portable") -> Gemm:
    shards = 1 if kind == "library" else work.world_size
    return gemm(machine, work, work.m, work.share(work.n), work.k, sms=sms, kind=kind, shards=shards)


def _shard_bytes(work: Work) -> int:
    return work.share(work.m) * work.k * work.element_bytes


def _push_us(machine: Machine, work: Work) -> float:
    return push_us(machine, work.peers * _shard_bytes(work), narrow=work.is_narrow(work.k))


def _as_shards_come(own: Gemm, work: Work, arrival_us: float) -> float:
    """Shards are multiplied in the order of their arrival, the own one first; SMs wait for what has not come."""
    shard_waves = -(-own.waves // work.world_size)
    end = 0.0
    for distance in range(work.world_size):
        end = max(
            end + own.us / work.world_size, distance * arrival_us + (shard_waves * own.wave_us if distance else 0)
        )
    return end
