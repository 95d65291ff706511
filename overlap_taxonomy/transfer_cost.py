"""The predicted time of what is moved: by SMs and copy engines to peers, to other layouts, by the library."""

from __future__ import annotations

from .machine import Machine
from .work import Work


def push_us(
    machine: Machine,
    size: float,
    *,
    narrow: bool,
    sms: int = 0,
    chunk_bytes: int = 0,
    to_one: bool = False,
    by_tma: bool = False,
) -> float:
    """Return the time in which SMs store so many bytes to peers.

    Args:
        machine: where.
        size: in bytes, to all peers together.
        narrow: whether rows are not on 16 bytes.
        sms: that send; 0 for all.
        chunk_bytes: after how many of them an SM waits for their arrival, to signal them; 0 for never.
        to_one: whether they go to one peer after the other, of all SMs at the same time to the same.
        by_tma: whether one warp of an SM sends tiles through shared memory.
    """
    sm_gbps = machine.sm_tma_gbps if by_tma else machine.sm_link_gbps
    if chunk_bytes:
        sm_gbps = chunk_bytes / (chunk_bytes / sm_gbps + machine.signal_us * 1e3)
    gbps = min(machine.peer_gbps if to_one else machine.link_gbps, (sms or machine.num_sms) * sm_gbps)
    return size / (gbps * (machine.narrow_link_gbps / machine.link_gbps if narrow else 1.0)) / 1e3


def aligned_us(machine: Machine, work: Work, m: int, n: int, k: int) -> float:
    """Return the time in which a rank's operands (m, k) and (k, n), B by columns, are copied to rows on 16 bytes."""
    return 2 * (m + n) * k * work.element_bytes / machine.align_gbps / 1e3 + machine.launch_us


def copy_us(machine: Machine, size: float, row_bytes: int) -> float:
    """Return the time of one copy by a copy engine, the start of it included."""
    gbps = machine.engine_narrow_rows_gbps if row_bytes % 512 else machine.engine_gbps
    return size / gbps / 1e3 + machine.engine_us


def copies_us(machine: Machine, size: float, row_bytes: int, *, copies: int, peers: int) -> float:
    """Return the time of copies by the copy engines, each of so many bytes.

    Args:
        machine: where.
        size, row_bytes: of a copy.
        copies: how many, as many to each of the peers.
        peers: how many. Copies to one of them are made one after the other; those to different ones at the same time
            where each has a link of its own, else these, too, one after the other.
    """
    in_a_row = copies // max(1, peers) if machine.is_fully_connected else copies
    return in_a_row * copy_us(machine, size, row_bytes)


def collective_us(machine: Machine, work: Work, size: float, *, gbps: float = 0.0) -> float:
    """Return the time of the library's collective.

    Args:
        machine, work: where, and among how many.
        size: what a rank sends, in bytes.
        gbps: its rate on large buffers; 0 for that of an all-gather.
    """
    large = size / (gbps or machine.collective_gbps) / 1e3 + machine.collective_us * work.peers
    small = size / machine.small_collective_gbps / 1e3 + machine.small_collective_us * work.peers
    return min(large, small)
