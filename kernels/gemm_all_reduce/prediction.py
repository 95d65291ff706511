"""Predicted times of GEMM + all-reduce, sums, or partials, of C to all: a function a variant."""

from __future__ import annotations

from overlap_taxonomy import Machine, Work
from overlap_taxonomy.gemm_cost import Gemm, stores_narrow_rows
from overlap_taxonomy.transfer_cost import push_us

from ..common.variants.prediction import ends, in_sequence, sm90_gemm, stream_k_call_us
from ..gemm_reduce_scatter import prediction as reduce_scatter
from ..gemm_reduce_scatter.prediction import behind_peers_us, last_us, reduced_bytes, split_partials, sum_us


def library(machine: Machine, work: Work) -> float:
    """The GEMM, then an all-reduce."""
    return in_sequence(machine, work, 2 * reduced_bytes(work), gbps=machine.all_reduce_gbps)


def bulk_synchronous(machine: Machine, work: Work) -> float:
    """As reduce-scatter, and all SMs push the sums."""
    return reduce_scatter.bulk_synchronous(machine, work) + _sums_us(machine, work)


def bulk_synchronous_library(machine: Machine, work: Work) -> float:
    """The same, with the library's GEMM."""
    return reduce_scatter.bulk_synchronous_library(machine, work) + _sums_us(machine, work)


def comm_programs(machine: Machine, work: Work, *, comm_share: float) -> float:
    """Some SMs push partial tiles, `comm_share` of all; the others push sums."""
    own, push = split_partials(machine, work, comm_share)
    # In a single wave the own tiles are multiplied beside the peers'.
    mine_us = own.us / work.world_size if own.waves > 1 else 0.0
    sent = max(own.us - mine_us, behind_peers_us(work, own.wave_us, push, 0.0))
    summed = max(mine_us, last_us(own) + _sums_us(machine, work))
    return sent + summed + sum_us(machine, work) + ends(machine, work, kernels=1)


def warp_specialized_sm90(machine: Machine, work: Work) -> float:
    """Partial tiles and sums leave by TMA while the next tiles are multiplied."""
    own = _sm90(machine, work)
    partials = push_us(machine, reduced_bytes(work), narrow=False, to_one=True)
    sums = push_us(machine, reduced_bytes(work), narrow=False)
    # The last tiles are own ones, whose sums leave when there is nothing left to multiply.
    sent_last = sums * min(1.0, own.last_share * work.world_size)
    summed = max(own.us + sent_last, own.wave_us + partials + sums)
    return summed + sum_us(machine, work) + ends(machine, work, kernels=1)


def fused_sequential_stream_k(machine: Machine, work: Work) -> float:
    """All SMs read weights; then partial tiles go to every rank, where those of all are added."""
    whole = work.m * work.n * work.out_bytes
    push = push_us(machine, work.peers * whole, narrow=stores_narrow_rows(machine, work.kind))
    exchange = push + work.world_size * whole / machine.sum_gbps / 1e3
    return stream_k_call_us(machine, work, work.m, work.n, work.share(work.k)) + exchange


def _sums_us(machine: Machine, work: Work) -> float:
    return push_us(machine, reduced_bytes(work), narrow=stores_narrow_rows(machine, work.kind))


def _sm90(machine: Machine, work: Work) -> Gemm:
    """A rank's GEMM: rows are cut among the ranks, or columns where that makes fewer tiles."""
    m, n, k = work.product
    ranks, peers = work.world_size, min(1, work.peers)
    by_rows = sm90_gemm(machine, work, m, n, k, shards=ranks, peers=peers)
    by_columns = sm90_gemm(machine, work, m, ranks * -(-n // ranks), k, peers=peers)
    return min(by_rows, by_columns, key=lambda own: own.us)
