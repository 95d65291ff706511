"""GEMM + reduce-scatter and GEMM + all-reduce: partial tiles of C to their owners; sums, or partials, to all."""

from __future__ import annotations

from ..axes import Agent, Mainloop, Schedule
from ..cost import Gemm, Work, collective_us, copy_us, gemm, push_us, stores_narrow_rows
from ..machine import Machine
from .common import Pattern, Place, comm_sms, ends, library, num_chunks, rows_in_tiles, split, stream_k


def _partial_gemm(machine: Machine, work: Work, *, sms: int = 0, kind: str = "portable") -> Gemm:
    return gemm(machine, work, work.m, work.n, work.share(work.k), sms=sms, kind=kind)


def _reduced(work: Work) -> int:
    return work.peers * work.share(work.m) * work.n * work.element_bytes


def _library_reduce(machine: Machine, work: Work) -> float:
    return library(machine, _partial_gemm(machine, work, kind="library"), work, _reduced(work))


def _bulk_reduce(machine: Machine, work: Work) -> float:
    return _partial_gemm(machine, work).us + _pull_us(machine, work) + ends(machine, kernels=2)


def _split_reduce(machine: Machine, work: Work, agent: Agent) -> float:
    own, push = _split_partials(machine, work, agent)
    sent = _behind_peers_us(work, own.wave_us, push, own.wave_us)
    return max(own.us, sent) + _sum_us(machine, work) + ends(machine, kernels=1)


def _fused_reduce(machine: Machine, work: Work) -> float:
    own = _partial_gemm(machine, work)
    push = push_us(machine, _reduced(work), narrow=stores_narrow_rows(machine, work), to_one=True)
    sent = _behind_peers_us(work, own.wave_us, push, own.wave_us)
    return max(own.us, sent) + _sum_us(machine, work) + ends(machine, kernels=1)


def _engine_reduce(machine: Machine, work: Work) -> float:
    own = _partial_gemm(machine, work)
    shard, row_bytes = _reduced(work) / max(1, work.peers), work.n * work.element_bytes
    chunks = num_chunks(work, shard)
    copies = work.peers * chunks * copy_us(machine, shard / chunks, row_bytes if row_bytes % 16 else 512)
    first = own.us / (work.world_size * chunks)
    sent = _behind_peers_us(work, first, copies, first)
    return max(own.us, sent) + _sum_us(machine, work) + ends(machine, kernels=3)


def _warp_reduce(machine: Machine, work: Work) -> float:
    own = gemm(machine, work, rows_in_tiles(work), work.n, work.share(work.k), kind="specialized")
    push = push_us(machine, _reduced(work), narrow=False, to_one=True)
    own_last = own.wave_us if own.waves > 1 else 0.0  # in a single wave they are multiplied beside the peers'
    sent = _behind_peers_us(work, own.wave_us, push, own_last)
    return max(own.us, sent) + _sum_us(machine, work) + ends(machine, kernels=1)


def _warp_all_reduce(machine: Machine, work: Work) -> float:
    own = _partial_gemm(machine, work, kind="specialized")
    partials = push_us(machine, _reduced(work), narrow=False, to_one=True)
    sums = push_us(machine, _reduced(work), narrow=False)
    # The last tiles are own ones, whose sums leave when there is nothing left to multiply.
    sent_last = sums * min(1.0, own.last_share * work.world_size)
    summed = max(own.us + sent_last, own.wave_us + partials + sums)
    return summed + _sum_us(machine, work) + ends(machine, kernels=1)


def _stream_k_reduce(machine: Machine, work: Work) -> float:
    push = push_us(machine, _reduced(work), narrow=stores_narrow_rows(machine, work))
    return stream_k(machine, work, work.m, work.n, work.share(work.k)) + push + _sum_us(machine, work)


def _library_all_reduce(machine: Machine, work: Work) -> float:
    own = _partial_gemm(machine, work, kind="library")
    return own.us + collective_us(machine, work, 2 * _reduced(work), gbps=machine.all_reduce_gbps) + machine.launch_us


def _bulk_all_reduce(machine: Machine, work: Work) -> float:
    sums = push_us(machine, _reduced(work), narrow=stores_narrow_rows(machine, work))
    return _bulk_reduce(machine, work) + sums


def _split_all_reduce(machine: Machine, work: Work, agent: Agent) -> float:
    own, push = _split_partials(machine, work, agent)
    sums = push_us(machine, _reduced(work), narrow=stores_narrow_rows(machine, work))
    sent = max(own.us * work.peers / work.world_size, _behind_peers_us(work, own.wave_us, push, 0.0))
    summed = max(own.us / work.world_size, own.wave_us + sums)
    return sent + summed + _sum_us(machine, work) + ends(machine, kernels=1)


def _fused_all_reduce(machine: Machine, work: Work) -> float:
    return _partial_gemm(machine, work).us + _exchange_us(machine, work) + ends(machine, kernels=1)


def _stream_k_all_reduce(machine: Machine, work: Work) -> float:
    return stream_k(machine, work, work.m, work.n, work.share(work.k)) + _exchange_us(machine, work)


def _exchange_us(machine: Machine, work: Work) -> float:
    """Partial sums of all of C to every peer, and those of all ranks added."""
    whole = work.m * work.n * work.element_bytes
    push = push_us(machine, work.peers * whole, narrow=stores_narrow_rows(machine, work))
    return push + work.world_size * whole / machine.sum_gbps / 1e3


def _split_partials(machine: Machine, work: Work, agent: Agent) -> tuple[Gemm, float]:
    """The GEMM on the SMs that multiply, and what the others take to send and signal the peers' partial tiles."""
    sms = comm_sms(machine, work, agent)
    own = _partial_gemm(machine, work, sms=machine.num_sms - sms)
    narrow = stores_narrow_rows(machine, work)
    return own, push_us(machine, _reduced(work), narrow=narrow, sms=sms, chunk_bytes=own.tile_bytes, to_one=True)


def _behind_peers_us(work: Work, first_us: float, sent_us: float, last_us: float) -> float:
    """When the own tiles, multiplied last, are done after those that are sent; alone there are none to come after."""
    return first_us + sent_us + last_us if work.peers else 0.0


def _sum_us(machine: Machine, work: Work) -> float:
    """Adding the peers' partials in the own tiles' epilogue."""
    return _reduced(work) / machine.sum_gbps / 1e3


def _pull_us(machine: Machine, work: Work) -> float:
    slower = machine.link_gbps / machine.narrow_link_gbps if stores_narrow_rows(machine, work) else 1.0
    return _reduced(work) * slower / machine.pull_gbps / 1e3


REDUCE_SCATTER_BASELINES: dict[str, Pattern] = {"library": _library_reduce}
REDUCE_SCATTER: dict[Place, Pattern] = {
    Place(Agent.ALL_SMS): _bulk_reduce,
    **split(_split_reduce, Agent.COMM_KERNEL, Agent.COMM_PROGRAMS),
    Place(Agent.COMPUTING_PROGRAM): _fused_reduce,
    Place(Agent.COPY_ENGINES): _engine_reduce,
    Place(Agent.COMM_WARPS, Mainloop.SM90): _warp_reduce,
    Place(Agent.COMPUTING_PROGRAM, schedule=Schedule.STREAM_K): _stream_k_reduce,
}

ALL_REDUCE_BASELINES: dict[str, Pattern] = {"library": _library_all_reduce}
ALL_REDUCE: dict[Place, Pattern] = {
    Place(Agent.ALL_SMS): _bulk_all_reduce,
    Place(Agent.COMPUTING_PROGRAM): _fused_all_reduce,
    **split(_split_all_reduce, Agent.COMM_PROGRAMS),
    Place(Agent.COMM_WARPS, Mainloop.SM90): _warp_all_reduce,
    Place(Agent.COMPUTING_PROGRAM, schedule=Schedule.STREAM_K): _stream_k_all_reduce,
}
