"""A row of ``iris-bench litmus``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LitmusRecord:
    """One litmus test; `rank.LITMUS` explains them.

    Args:
        litmus: its name.
        scope: "sys", between two ranks, or "gpu", between two programs of one rank.
        weakened: what is left out of the promised ordering; empty where it is kept.
        rounds: of all pairs of programs together; where it did not run, those asked for.
        forbidden: how many of them ended in what the ordering forbids.
        seconds: that they took.
        status: "wrong" if a promised ordering was broken, "unsupported" where the device has nothing of the kind,
            "error" where the run ended, else "ok"; `reason` says more.
        timestamp: when it was measured, UTC.
    """

    litmus: str
    scope: str
    weakened: str
    rounds: int
    forbidden: int | None
    seconds: float | None
    status: str
    reason: str
    world_size: int
    device: str
    device_name: str
    seed: int
    torch: str
    triton: str
    driver: str
    commit: str
    timestamp: str
    command: str
