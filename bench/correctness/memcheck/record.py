"""A row of ``iris-bench memcheck``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemcheckRecord:
    """One variant.

    Args:
        family, variant: what was called, in several dtypes on two small shapes.
        errors: that compute-sanitizer reports, over all processes; None where it looked at none to its end.
        seconds: that it took, with starting ranks and compiling.
        status: "ok", "wrong" where there are errors or an output is wrong, "error" where the run ended early or
            nothing was looked at; `reason` says more.
        seed: of all that was drawn; None where the ranks did not start.
        timestamp: when it ended, UTC.
    """

    family: str
    variant: str
    errors: int | None
    seconds: float | None
    status: str
    reason: str
    world_size: int
    device: str
    device_name: str
    seed: int | None
    torch: str
    triton: str
    driver: str
    commit: str
    timestamp: str
    command: str
