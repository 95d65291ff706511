"""A row of ``iris-bench layers``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayersRecord:
    """One measurement of a pair of layers, (width → features) and back, with SiLU between.

    Args:
        subject: whose layers; `subjects.SUBJECTS` explains them.
        layout: "sequence", ranks have a part of the tokens around the pair; or "replicated", all have all.
        phase: "forward", in inference mode; or "step", forward and all gradients.
        tokens, width, features: of all ranks.
        device: "cpu" (interpreted: its times are not performance) or "cuda" (any GPU).
        status: "ok", "wrong", "unsupported" or "error"; `reason` says more.
        error: the largest ‖found − expected‖ / ‖expected‖ of a row of the output and, in a step, of the gradients; of
            the products alone, of their sum over the ranks.
        time_us: of a call in a burst, the slowest rank's median.
        latency_us: of one call alone, the same.
        host_us: what it takes the host to queue a call; hidden from the two above. Empty on a CPU.
        speedup_vs_torch: `time_us` of "torch" in the same run, over this one. Empty on a CPU.
        timestamp: when it was measured, UTC.
    """

    subject: str
    layout: str
    phase: str
    tokens: int
    width: int
    features: int
    world_size: int
    dtype: str
    device: str
    device_name: str
    status: str
    error: float | None
    time_us: float | None
    latency_us: float | None
    host_us: float | None
    speedup_vs_torch: float | None
    rounds: int
    burst: int
    seed: int
    torch: str
    triton: str
    driver: str
    commit: str
    timestamp: str
    command: str
    reason: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells measurements of different things apart."""
        return (self.subject, self.phase, *self.pair_key)

    @property
    def thing(self) -> tuple[Any, ...]:
        """What was measured, and on which kind of device."""
        return (*self.key, self.device_name)

    @property
    def pair_key(self) -> tuple[Any, ...]:
        """What all rows of a pair of layers in one layout have in common."""
        sizes = (self.tokens, self.width, self.features)
        return (self.layout, *sizes, self.world_size, self.dtype, self.device)
