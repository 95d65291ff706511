"""A row of ``iris-bench host``."""

from __future__ import annotations

from dataclasses import dataclass

from ...records.measured_on import MeasuredOn


@dataclass(frozen=True)
class Outcome:
    """What one kind of call takes the host until it has queued it, by rank 0's clock.

    Args:
        family: the product and the collective.
        m, n, k: of the whole product.
        variant: what was asked for.
        way: the layer of software at which the call begins; `ways.WAYS` explains them.
        kind: "repeated", back to back, the mean of each burst; "alone", behind a synchronisation; "cold", likewise,
            with the host's caches written over, as they are behind other work of a model's; "new_m", alone, with
            a number of rows that the operator has not had, and whose kernels are loaded; "new_weight", alone, with a
            weight at an address that it has not had, of a layer that has not had so many rows.
        median_us, lowest_us, p90_us, highest_us: of a call, the 90th percentile among them; of the bursts' means where
            calls are repeated.
        calls: how many were timed.
        status: "ok", "wrong", "unsupported", or "error" if it failed on all ranks alike; `reason` says more.
        config: what ran.
    """

    family: str
    m: int
    n: int
    k: int
    variant: str
    way: str
    kind: str
    median_us: float | None
    lowest_us: float | None
    p90_us: float | None
    highest_us: float | None
    calls: int | None
    status: str
    reason: str
    config: str


@dataclass(frozen=True)
class HostRecord(MeasuredOn, Outcome):
    """An outcome, and what it was measured on, and with."""
