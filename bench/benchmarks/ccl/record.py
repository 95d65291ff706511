"""A row of ``iris-bench ccl``."""

from __future__ import annotations

from dataclasses import dataclass

from ...records.measured_on import MeasuredOn


@dataclass(frozen=True)
class Outcome:
    """What came of measuring one collective, of one size, by one library.

    Args:
        kind: the collective.
        library: "iris", or the backend of torch's process group: "nccl", "gloo".
        mode: "eager" or "graph".
        variant: of iris, by name; empty where there was no choice, as of torch's.
        comm_sms: most programs of iris, or None for its own choice.
        bytes: of the larger of a rank's tensors.
        time_us: of a call among others, back to back; of the slowest rank, the median.
        latency_us: of one call alone, likewise.
        host_us: that the host takes for a call.
        status: "ok", "wrong" if the output was not what the collective is defined to give, "unsupported", or "error" if
            it failed on all ranks alike; `reason` says of what, or which times are not the device's alone.
        rounds: samples of it; fewer than asked for, where they take long; of what is not ok, those asked for.
    """

    kind: str
    library: str
    mode: str
    variant: str
    comm_sms: int | None
    bytes: int
    time_us: float | None
    latency_us: float | None
    host_us: float | None
    status: str
    rounds: int
    reason: str


@dataclass(frozen=True)
class CclRecord(MeasuredOn, Outcome):
    """An outcome, and what it was measured on, and with."""
