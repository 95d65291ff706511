"""Parts that the predicted times of all families share: waves of tiles, and what communication they hide.

The prediction of a variant is a function in its family's `prediction.py`, named in its `Implementation`. A GEMM is
waves of tiles over the SMs (overlap_taxonomy/cost.py). The first wave has nothing to send, the bytes of the last one
leave when there is nothing left to multiply. A call takes the longer of the work and the communication, and what
neither hides; docs/design.md has the formulas and how far they are off.
"""

from __future__ import annotations

from overlap_taxonomy import Machine, Work
from overlap_taxonomy.cost import Gemm, collective_us, stream_k_us

from ..config import LEAST_CHUNK_BYTES


def in_sequence(machine: Machine, own: Gemm, work: Work, sent: int) -> float:
    """A GEMM and the library's collective of `sent` bytes, one after the other."""
    return own.us + collective_us(machine, work, sent) + machine.launch_us


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


def rows_in_tiles(work: Work) -> int:
    """The rows that are multiplied where every shard of rows is cut into tiles of its own, of 128 rows."""
    return work.world_size * -(-work.share(work.m) // 128) * 128


def ends(machine: Machine, work: Work, *, kernels: int) -> float:
    """The handshake with peers, and the launches of so many kernels."""
    return (machine.handshake_us if work.peers else 0.0) + kernels * machine.launch_us


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
