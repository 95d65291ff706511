"""All-gather + GEMM: shards of A to every peer."""

from __future__ import annotations

from functools import partial

from ..axes import Agent, Mainloop, Schedule
from ..cost import Gemm, Work, copy_us, gemm, push_us
from ..machine import Machine
from .common import (
    CHUNKS,
    GATED_RATE,
    Pattern,
    Place,
    as_shards_come,
    comm_sms,
    ends,
    library,
    rows_in_tiles,
    split,
    stream_k,
)


def _gather_gemm(machine: Machine, work: Work, *, sms: int = 0, kind: str = "portable") -> Gemm:
    return gemm(machine, work, work.m, work.share(work.n), work.k, sms=sms, kind=kind)


def _shard_bytes(work: Work) -> int:
    return work.share(work.m) * work.k * work.element_bytes


def _library_gather(machine: Machine, work: Work) -> float:
    return library(machine, _gather_gemm(machine, work, kind="library"), work, work.peers * _shard_bytes(work))


def _bulk_gather(machine: Machine, work: Work) -> float:
    push = push_us(machine, work.peers * _shard_bytes(work), narrow=work.is_narrow(work.k))
    return _gather_gemm(machine, work).us + push + ends(machine, kernels=2)


def _fused_gather(machine: Machine, work: Work) -> float:
    own = _gather_gemm(machine, work, kind="pointers")
    columns_of_tiles = -(-work.share(work.n) // own.tile_n)
    pull = work.peers * _shard_bytes(work) * columns_of_tiles / machine.pull_gbps / 1e3
    return max(own.us, pull) + own.wave_us + ends(machine, kernels=1)


def _split_gather(machine: Machine, work: Work, agent: Agent) -> float:
    sms = comm_sms(machine, work, agent)
    arrival = push_us(machine, _shard_bytes(work), narrow=work.is_narrow(work.k), sms=sms, to_one=True)
    own = _gather_gemm(machine, work, sms=machine.num_sms - sms)
    return as_shards_come(own, work, arrival) + ends(machine, kernels=1)


def _sm90_split_gather(machine: Machine, work: Work) -> float:
    sms = comm_sms(machine, work, Agent.COMM_PROGRAMS) if work.peers else 0
    rows = rows_in_tiles(work)
    own = gemm(machine, work, rows, work.share(work.n), work.k, sms=machine.num_sms - sms, kind="specialized")
    if not work.peers:
        return own.us + ends(machine, kernels=1)
    push = push_us(machine, work.peers * _shard_bytes(work), narrow=False, sms=sms)
    return max(own.us / GATED_RATE, push + own.wave_us / CHUNKS) + ends(machine, kernels=1)


def _engine_gather(machine: Machine, work: Work, kind: str = "portable") -> float:
    own = _gather_gemm(machine, work, kind=kind)
    row_bytes = work.k * work.element_bytes if work.reads_narrow_rows else 512  # others are contiguous
    arrival = copy_us(machine, _shard_bytes(work), row_bytes)
    return as_shards_come(own, work, arrival) + ends(machine, kernels=1)


def _stream_k_gather(machine: Machine, work: Work) -> float:
    push = push_us(machine, work.peers * _shard_bytes(work), narrow=work.is_narrow(work.k))
    return stream_k(machine, work, work.m, work.share(work.n), work.k) + push


BASELINES: dict[str, Pattern] = {"library": _library_gather}
PLACES: dict[Place, Pattern] = {
    Place(Agent.ALL_SMS): _bulk_gather,
    **split(_split_gather, Agent.COMM_KERNEL, Agent.COMM_PROGRAMS),
    Place(Agent.COMPUTING_PROGRAM): _fused_gather,
    Place(Agent.COPY_ENGINES): _engine_gather,
    Place(Agent.COMM_PROGRAMS, Mainloop.SM90): _sm90_split_gather,
    Place(Agent.COPY_ENGINES, Mainloop.SM90): partial(_engine_gather, kind="specialized"),
    Place(Agent.COMPUTING_PROGRAM, schedule=Schedule.STREAM_K): _stream_k_gather,
}
