"""What the patterns of all families share: shares of SMs, launches, waves and what they hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..axes import Agent, Mainloop, Schedule
from ..cost import Gemm, Work, collective_us
from ..machine import Machine

Pattern = Callable[[Machine, Work], float]


class Place(NamedTuple):
    """Where a variant of ours stands in the taxonomy, as far as its time depends on it."""

    agent: Agent
    mainloop: Mainloop = Mainloop.PORTABLE
    schedule: Schedule = Schedule.DATA_PARALLEL


# How the kernels are configured by default, where it shows in the time.
COMM_SHARES = {
    ("gemm_all_scatter", Agent.COMM_KERNEL): 12 / 132,
    ("gemm_all_scatter", Agent.COMM_PROGRAMS): 12 / 132,
    ("all_gather_gemm", Agent.COMM_KERNEL): 12 / 132,
    ("all_gather_gemm", Agent.COMM_PROGRAMS): 16 / 132,
    ("gemm_reduce_scatter", Agent.COMM_KERNEL): 16 / 132,
    ("gemm_reduce_scatter", Agent.COMM_PROGRAMS): 24 / 132,
    ("gemm_all_reduce", Agent.COMM_PROGRAMS): 24 / 132,
}
STREAM_K_ROWS = 16  # of the lowest tile
CHUNKS = 8  # of a tile's operands, awaited one after the other
GATED_RATE = 0.75  # how fast tiles are multiplied whose chunks are awaited, and narrower than others
LEAST_CHUNK_BYTES = 8 << 20  # the copy engines' chunks are at least so large
COPIES_AT_ONCE_A_CALL = {"gemm_all_scatter": 4, "gemm_reduce_scatter": 2}  # chunks at most, of a rank's shard


def library(machine: Machine, own: Gemm, work: Work, sent: int) -> float:
    """A GEMM, then a collective of `sent` bytes."""
    return own.us + collective_us(machine, work, sent) + machine.launch_us


def stream_k(machine: Machine, work: Work, m: int, n: int, k: int) -> float:
    """A stream-K GEMM, and what its one kernel waits for: all SMs read, or multiply slowly."""
    rows = -(-m // STREAM_K_ROWS) * STREAM_K_ROWS
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


def comm_sms(machine: Machine, work: Work, agent: Agent) -> int:
    """How many SMs are set apart for communication."""
    return max(1, round(machine.num_sms * COMM_SHARES[work.family, agent]))


def num_chunks(work: Work, part_bytes: float) -> int:
    """Into how many chunks a part of a matrix is cut for the copy engines."""
    return max(1, min(COPIES_AT_ONCE_A_CALL[work.family], int(part_bytes) // LEAST_CHUNK_BYTES))


def sent_beside(own: Gemm, push: float) -> float:
    """Tiles leave while the next are multiplied: the first wave sends nothing, the last one's leave after it."""
    return max(own.us + push * own.last_share, own.wave_us + push)


def exposed(machine: Machine, own: Gemm) -> float:
    """The part of the stores that a program which stores its own tile cannot hide: all of it in the last wave."""
    return machine.stall_share + (1 - machine.stall_share) / own.waves


def as_shards_come(own: Gemm, work: Work, arrival_us: float) -> float:
    """Shards are multiplied in the order of their arrival, the own one first; SMs wait for what has not come."""
    shard_waves = -(-own.waves // work.world_size)
    end = 0.0
    for distance in range(work.world_size):
        end = max(
            end + own.us / work.world_size, distance * arrival_us + (shard_waves * own.wave_us if distance else 0)
        )
    return end


def split(pattern: Callable[[Machine, Work, Agent], float], *agents: Agent) -> dict[Place, Pattern]:
    """Return a pattern in which SMs are set apart, by the places of those who communicate on them."""

    def of(agent: Agent) -> Pattern:
        return lambda machine, work: pattern(machine, work, agent)

    return {Place(agent): of(agent) for agent in agents}
