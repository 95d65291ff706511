"""Predicted times of GEMM + reduce-scatter, partial tiles of C to their owners: a function a variant."""

from __future__ import annotations

from overlap_taxonomy import Machine, Work
from overlap_taxonomy.gemm_cost import Gemm, gemm, stores_narrow_rows, tiles_of, widest
from overlap_taxonomy.library_cost import library_gemm
from overlap_taxonomy.transfer_cost import copies_us, push_us

from ..common.variants.prediction import (
    comm_sms,
    ends,
    in_sequence,
    num_chunks,
    portable_gemm,
    sm90_gemm,
    stream_k_call_us,
)

_MOST_CHUNKS = 2  # that the copy engines send, of a shard


def library(machine: Machine, work: Work) -> float:
    """The GEMM, then a reduce-scatter."""
    return in_sequence(machine, work, reduced_bytes(work))


def bulk_synchronous(machine: Machine, work: Work) -> float:
    """The GEMM, then all SMs pull and add partials."""
    return own_gemm(machine, work).us + _pull_us(machine, work) + ends(machine, work, kernels=2)


def bulk_synchronous_library(machine: Machine, work: Work) -> float:
    """The same, with the library's GEMM."""
    own = library_gemm(machine, work)
    return own.us + _pull_us(machine, work) + ends(machine, work, kernels=2)


def comm_programs(machine: Machine, work: Work, *, comm_share: float) -> float:
    """Some SMs push partial tiles, `comm_share` of all; own tiles, multiplied last, add the peers'."""
    own, push = split_partials(machine, work, comm_share)
    sent = behind_peers_us(work, own.wave_us, push, last_us(own))
    return max(own.us, sent) + sum_us(machine, work) + ends(machine, work, kernels=1)


def comm_kernel(machine: Machine, work: Work, *, comm_share: float) -> float:
    """A kernel multiplies the peers' tiles, one beside it pushes them, and then one multiplies and adds the own."""
    whole, push = split_partials(machine, work, comm_share)
    peers_us, own_us = _in_two_kernels(machine, work, whole, sms=machine.num_sms - comm_sms(machine, comm_share))
    sent = behind_peers_us(work, whole.wave_us, push, 0.0)
    return max(peers_us + own_us, sent) + sum_us(machine, work) + ends(machine, work, kernels=2)


def fused_sequential(machine: Machine, work: Work) -> float:
    """Programs store partial tiles at their owners."""
    own = own_gemm(machine, work)
    push = push_us(machine, reduced_bytes(work), narrow=stores_narrow_rows(machine, work.kind), to_one=_to_one(machine))
    sent = behind_peers_us(work, own.wave_us, push, last_us(own))
    return max(own.us, sent) + sum_us(machine, work) + ends(machine, work, kernels=1)


def copy_engine(machine: Machine, work: Work) -> float:
    """The copy engines send chunks of partials."""
    shard, row_bytes = reduced_bytes(work) / max(1, work.peers), work.n * work.out_bytes
    chunks = num_chunks(shard, most=_MOST_CHUNKS)
    row_bytes = row_bytes if row_bytes % 16 else 512
    copies = copies_us(machine, shard / chunks, row_bytes, copies=work.peers * chunks, peers=work.peers)
    peers_us, own_us = _in_two_kernels(machine, work, own_gemm(machine, work))
    computed_first = work.peers if machine.is_fully_connected else 1  # chunks: a tile of each peer's in turn
    sent = behind_peers_us(work, computed_first * peers_us / max(1, work.peers * chunks), copies, 0.0)
    return max(peers_us + own_us, sent) + sum_us(machine, work) + ends(machine, work, kernels=3)


def warp_specialized_sm90(machine: Machine, work: Work) -> float:
    """Partial tiles leave by TMA while the next are multiplied."""
    own = sm90_gemm(machine, work, *work.product, shards=work.world_size)
    push = push_us(machine, reduced_bytes(work), narrow=False, to_one=True)
    sent = behind_peers_us(work, own.wave_us, push, last_us(own))
    return max(own.us, sent) + sum_us(machine, work) + ends(machine, work, kernels=1)


def fused_sequential_stream_k(machine: Machine, work: Work) -> float:
    """All SMs read weights; then partial tiles are pushed and added.

    Ranks have the same tiles at the same time: in several waves all of them push to one owner after the other, whose
    link is the limit. 8192^3 over four H200s took 1,125 us: 279 for each of four owners, and 9 more.
    """
    push = push_us(machine, reduced_bytes(work), narrow=stores_narrow_rows(machine, work.kind))
    m, n, k = work.product
    own_us = stream_k_call_us(machine, work, m, n, k)
    waves = tiles_of(m, n, (128, widest(work.sums, "portable"))) / machine.num_sms
    in_turns = max(1.0, min(work.world_size, waves)) * push + own_us / max(1.0, waves)
    return max(own_us + push, in_turns) + sum_us(machine, work)


def own_gemm(machine: Machine, work: Work, *, sms: int = 0) -> Gemm:
    """A rank's GEMM, over its part of k."""
    return portable_gemm(machine, work, *work.product, sms=sms, shards=work.world_size)


def reduced_bytes(work: Work) -> int:
    """Bytes of partials that a rank sends."""
    return work.peers * work.share(work.m) * work.n * work.out_bytes


def split_partials(machine: Machine, work: Work, comm_share: float) -> tuple[Gemm, float]:
    """The GEMM on the SMs that multiply, and what the others take to send and signal the peers' partial tiles."""
    sms = comm_sms(machine, comm_share)
    own = own_gemm(machine, work, sms=machine.num_sms - sms)
    narrow = stores_narrow_rows(machine, work.kind)
    return own, push_us(
        machine,
        reduced_bytes(work),
        narrow=narrow,
        sms=sms,
        chunk_bytes=own.tile_m * own.tile_n * work.out_bytes,
        to_one=_to_one(machine),
    )


def behind_peers_us(work: Work, first_us: float, sent_us: float, last_us: float) -> float:
    """When the own tiles, multiplied last, are done after those that are sent; alone there are none to come after."""
    return first_us + sent_us + last_us if work.peers else 0.0


def last_us(own: Gemm) -> float:
    """What the own tiles take after the peers'; in a single wave they are multiplied beside these."""
    return own.last_us if own.waves > 1 else 0.0


def sum_us(machine: Machine, work: Work) -> float:
    """Adding the peers' partials in the own tiles' epilogue."""
    return reduced_bytes(work) / machine.sum_gbps / 1e3


def _to_one(machine: Machine) -> bool:
    """Whether partials go to one owner after the other: to all in turn where each is behind a link of its own."""
    return not machine.is_fully_connected


def _pull_us(machine: Machine, work: Work) -> float:
    """What all SMs take to pull partials."""
    slower = machine.link_gbps / machine.narrow_link_gbps if stores_narrow_rows(machine, work.kind) else 1.0
    return reduced_bytes(work) * slower / machine.pull_gbps / 1e3


def _in_two_kernels(machine: Machine, work: Work, whole: Gemm, *, sms: int = 0) -> tuple[float, float]:
    """What the peers' tiles take, and then this rank's own: each a kernel with waves of its own."""
    m, n, k = work.product
    tile, rows = (whole.tile_m, whole.tile_n), work.share(m)
    mine = gemm(machine, work, rows, n, k, tile=tile, sms=sms, shards=1)
    if not work.peers:
        return 0.0, mine.us
    theirs = gemm(machine, work, rows * work.peers, n, k, tile=tile, sms=sms, shards=work.peers)
    return theirs.us, mine.us
