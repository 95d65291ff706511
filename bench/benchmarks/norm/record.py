"""A row of ``iris-bench norm``."""

from __future__ import annotations

from dataclasses import dataclass

from ...records.measured_on import MeasuredOn


@dataclass(frozen=True)
class Outcome:
    """What came of measuring one way to multiply, sum over ranks, add a residual and norm.

    Args:
        family: the product and the collective.
        m, n, k: of the whole product.
        way: "library": cuBLAS, NCCL, and one kernel that adds the residual and norms; "unfused": a kernel of ours, and
            that kernel; "fused": what the family's operator does for a problem with a residual and a norm; "kraken"
            and "flashinfer": cuBLAS, and that project's all-reduce with a residual and a norm. Kraken's does not return
            the sum.
        variant: which of ours; empty of others'.
        mode: "eager" or "graph".
        normed_dtype: as torch names it; empty for C's.
        time_us: of a call among others, back to back; of the slowest rank, the median.
        latency_us: of one call alone, likewise.
        host_us: that the host takes for a call.
        status: "ok", "wrong", "unsupported", or "error" if it failed on all ranks alike.
        rounds: samples of it.
        reason: why it is not ok, or which times are not the device's alone.
        config: what ran.
    """

    family: str
    m: int
    n: int
    k: int
    way: str
    variant: str
    mode: str
    normed_dtype: str
    time_us: float | None
    latency_us: float | None
    host_us: float | None
    status: str
    rounds: int
    reason: str
    config: str


@dataclass(frozen=True)
class NormRecord(MeasuredOn, Outcome):
    """An outcome, and what it was measured on, and with."""
