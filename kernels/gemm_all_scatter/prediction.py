"""Predicted times of GEMM + all-scatter, tiles of C to every peer: a function a variant."""

from __future__ import annotations

from overlap_taxonomy import Machine, Work
from overlap_taxonomy.gemm_cost import Gemm
from overlap_taxonomy.library_cost import library_gemm
from overlap_taxonomy.transfer_cost import copies_us, push_us

from ..common.variants.prediction import (
    comm_sms,
    ends,
    exposed,
    in_sequence,
    num_chunks,
    portable_gemm,
    sent_beside,
    sm90_gemm,
    stream_k_call_us,
)

_MOST_CHUNKS = 4  # that the copy engines send, of a rank's block
# A call waits for so much of the handshake: its first tile is multiplied while peers become ready (65 to 1024 rows).
_WAITS = 0.4


def library(machine: Machine, work: Work) -> float:
    """The GEMM, then an all-gather; C in blocks."""
    return in_sequence(machine, work, _sent(work))


def library_layout(machine: Machine, work: Work) -> float:
    """The same, then a copy into one matrix."""
    moved = 2 * work.m * work.n * work.out_bytes
    return library(machine, work) + moved / machine.layout_gbps / 1e3 + machine.launch_us


def library_list(machine: Machine, work: Work) -> float:
    """The same, a copy per rank."""
    return library_layout(machine, work) + machine.launch_us * work.peers


def bulk_synchronous(machine: Machine, work: Work) -> float:
    """The GEMM, then all SMs push."""
    return _own(machine, work).us + _push_us(machine, work) + ends(machine, work, kernels=2)


def bulk_synchronous_library(machine: Machine, work: Work) -> float:
    """The library's GEMM, then all SMs push."""
    own = library_gemm(machine, work)
    return own.us + _push_us(machine, work) + ends(machine, work, kernels=2)


def comm_programs(machine: Machine, work: Work, *, comm_share: float) -> float:
    """Some SMs push what the others multiply; `comm_share` of all."""
    sms = comm_sms(machine, comm_share)
    own = _own(machine, work, sms=machine.num_sms - sms)
    return sent_beside(own, _push_us(machine, work, sms=sms)) + ends(machine, work, kernels=1)


def fused_sequential(machine: Machine, work: Work) -> float:
    """Programs store their tiles to peers, and stall."""
    own, push = _own(machine, work, most_columns=128), _push_us(machine, work)
    return max(own.us + push * exposed(machine, own), own.wave_us + push) + ends(machine, work, kernels=1)


def copy_engine(machine: Machine, work: Work) -> float:
    """The copy engines send chunks of rows."""
    own = _own(machine, work)
    columns = work.share(work.n) * work.out_bytes
    chunks = num_chunks(work.m * columns, most=_MOST_CHUNKS)
    copies = copies_us(machine, work.m * columns / chunks, columns, copies=work.peers, peers=work.peers)
    return max(own.us + copies, own.us / chunks + chunks * copies) + ends(machine, work, kernels=2)


def warp_specialized_sm90(machine: Machine, work: Work) -> float:
    """Tiles leave by TMA while the next are multiplied; the first one is multiplied while peers become ready."""
    own = sm90_gemm(machine, work, *work.product, peers=work.peers, is_sent=True)
    us = sent_beside(own, push_us(machine, _sent(work), narrow=False))
    return us + ends(machine, work, kernels=1, waits=_WAITS)


def fused_sequential_stream_k(machine: Machine, work: Work) -> float:
    """All SMs read weights; then tiles are pushed."""
    return stream_k_call_us(machine, work, work.m, work.share(work.n), work.k) + _push_us(machine, work)


def _own(machine: Machine, work: Work, *, sms: int = 0, most_columns: int = 256) -> Gemm:
    return portable_gemm(machine, work, *work.product, sms=sms, most_columns=most_columns)


def _sent(work: Work) -> int:
    return work.peers * work.m * work.share(work.n) * work.out_bytes


def _push_us(machine: Machine, work: Work, *, sms: int = 0) -> float:
    return push_us(machine, _sent(work), narrow=work.has_narrow_output, sms=sms)
