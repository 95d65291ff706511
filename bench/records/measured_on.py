"""What the rows of several commands say of the machine, the versions and the run that they are from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredOn:
    """What an outcome was measured on, and with; its columns come behind the outcome's own.

    Args:
        timestamp: when it was measured, UTC.
    """

    world_size: int
    device: str
    device_name: str
    burst: int
    seed: int
    torch: str
    triton: str
    driver: str
    commit: str
    timestamp: str
    command: str
