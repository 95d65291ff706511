"""Parts that the predicted times of all families share: waves of tiles, and what communication they hide.

The prediction of a variant is a function in its family's `prediction.py`, named in its `Implementation`. A GEMM is
waves of tiles over the SMs (overlap_taxonomy/cost.py). The first wave has nothing to send, the bytes of the last one
leave when there is nothing left to multiply. A call takes the longer of the work and the communication, and what
neither hides; docs/design.md has the formulas and how far they are off.
"""

from __future__ import annotations

from overlap_taxonomy import Machine, Work
from overlap_taxonomy.cost import Gemm, collective_us

from .config import LEAST_CHUNK_BYTES

_STREAM_K_ROWS = 16  # of the lowest tile


def in_sequence(machine: Machine, own: Gemm, work: Work, sent: int) -> float:
    """A GEMM and the library's collective of `sent` bytes, one after the other."""
    return own.us + collective_us(machine, work, sent) + machine.launch_us


def stream_k_us(machine: Machine, work: Work, m: int, n: int, k: int) -> float:
    """A stream-K GEMM, and what its one kernel waits for: all SMs read, or multiply slowly."""
    rows = -(-m // _STREAM_K_ROWS) * _STREAM_K_ROWS
    tflops = machine.fp32_tflops if work.element_bytes > 2 else machine.boost_tflops
    tflops *= min(machine.tile_rates.values())
    if work.reads_narrow_rows and not machine.has_descriptors(work.element_bytes):
        tflops /= machine.narrow_slowdown
    read_us = work.element_bytes * (m * k + k * n + m * n) / machine.memory_gbps / 1e3
    multiply_us = 2.0 * rows * n * k / tflops / 1e6
    return max(read_us, multiply_us) + machine.split_us + machine.hop_us + machine.launch_us


def rows_in_tiles(work: Work) -> int:
    """The rows that are multiplied where every shard of rows is cut into tiles of its own, of 128 rows."""
    return work.world_size * -(-work.share(work.m) // 128) * 128


def ends(machine: Machine, *, kernels: int) -> float:
    """The handshake, and the launches of so many kernels."""
    return machine.handshake_us + kernels * machine.launch_us


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
