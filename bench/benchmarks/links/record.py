"""A row of ``iris-bench links``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkRecord:
    """One measurement; `rank.KINDS` explains the kinds.

    Args:
        kind: what was done.
        from_rank, to_rank: who did it and whose memory it was; None for all at once.
        bytes: that a rank moved in a call; 0 where nothing is moved.
        time_us: of a call among others, back to back: the acting rank's median, or of all the slowest one's.
        gbps: 10⁹ bytes a second of one rank, from `time_us`; None where nothing is moved.
        path: how a rank reaches the other's memory, one of `paths`; empty for all at once.
        status: "ok", or "wrong" if what arrived was not what was sent; there are no times then.
        timestamp: when it was measured, UTC.
    """

    kind: str
    from_rank: int | None
    to_rank: int | None
    path: str
    world_size: int
    device: str
    device_name: str
    bytes: int
    time_us: float | None
    gbps: float | None
    status: str
    rounds: int
    burst: int
    seed: int
    torch: str
    triton: str
    driver: str
    commit: str
    timestamp: str
    command: str
