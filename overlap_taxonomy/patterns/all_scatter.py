"""GEMM + all-scatter: tiles of C to every peer."""

from __future__ import annotations

from ..axes import Agent, Mainloop, Schedule
from ..cost import Gemm, Work, copy_us, gemm, push_us
from ..machine import Machine
from .common import Pattern, Place, comm_sms, ends, exposed, library, num_chunks, sent_beside, split, stream_k


def _scatter_gemm(machine: Machine, work: Work, *, sms: int = 0, kind: str = "portable") -> Gemm:
    return gemm(machine, work, work.m, work.share(work.n), work.k, sms=sms, kind=kind)


def _scattered(work: Work) -> int:
    return work.peers * work.m * work.share(work.n) * work.element_bytes


def _library_scatter(machine: Machine, work: Work) -> float:
    return library(machine, _scatter_gemm(machine, work, kind="library"), work, _scattered(work))


def _library_scatter_layout(machine: Machine, work: Work) -> float:
    moved = 2 * work.m * work.n * work.element_bytes
    return _library_scatter(machine, work) + moved / machine.layout_gbps / 1e3 + machine.launch_us


def _library_scatter_list(machine: Machine, work: Work) -> float:
    return _library_scatter_layout(machine, work) + machine.launch_us * work.peers


def _bulk_scatter(machine: Machine, work: Work) -> float:
    push = push_us(machine, _scattered(work), narrow=work.is_narrow(work.n))
    return _scatter_gemm(machine, work).us + push + ends(machine, kernels=2)


def _split_scatter(machine: Machine, work: Work, agent: Agent) -> float:
    sms = comm_sms(machine, work, agent)
    own = _scatter_gemm(machine, work, sms=machine.num_sms - sms)
    push = push_us(machine, _scattered(work), narrow=work.is_narrow(work.n), sms=sms)
    return sent_beside(own, push) + ends(machine, kernels=1)


def _fused_scatter(machine: Machine, work: Work) -> float:
    own = _scatter_gemm(machine, work)
    push = push_us(machine, _scattered(work), narrow=work.is_narrow(work.n))
    return max(own.us + push * exposed(machine, own), own.wave_us + push) + ends(machine, kernels=1)


def _engine_scatter(machine: Machine, work: Work) -> float:
    own = _scatter_gemm(machine, work)
    columns = work.share(work.n) * work.element_bytes
    chunks = num_chunks(work, work.m * columns)
    copies = work.peers * copy_us(machine, work.m * columns / chunks, columns)
    return max(own.us + copies, own.us / chunks + chunks * copies) + ends(machine, kernels=2)


def _warp_scatter(machine: Machine, work: Work) -> float:
    own = _scatter_gemm(machine, work, kind="specialized")
    push = push_us(machine, _scattered(work), narrow=False)
    return sent_beside(own, push) + ends(machine, kernels=1)


def _stream_k_scatter(machine: Machine, work: Work) -> float:
    push = push_us(machine, _scattered(work), narrow=work.is_narrow(work.n))
    return stream_k(machine, work, work.m, work.share(work.n), work.k) + push


BASELINES: dict[str, Pattern] = {
    "library": _library_scatter,
    "library_layout": _library_scatter_layout,
    "library_list": _library_scatter_list,
}
PLACES: dict[Place, Pattern] = {
    Place(Agent.ALL_SMS): _bulk_scatter,
    **split(_split_scatter, Agent.COMM_KERNEL, Agent.COMM_PROGRAMS),
    Place(Agent.COMPUTING_PROGRAM): _fused_scatter,
    Place(Agent.COPY_ENGINES): _engine_scatter,
    Place(Agent.COMM_WARPS, Mainloop.SM90): _warp_scatter,
    Place(Agent.COMPUTING_PROGRAM, schedule=Schedule.STREAM_K): _stream_k_scatter,
}
