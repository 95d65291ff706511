"""A row of ``iris-bench decoder``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DecoderRecord:
    """One measurement of a decoder's layers, of one system in one mode.

    Args:
        model, layers: whose sizes, and how many of its layers.
        phase: "prefill", the forward pass of whole sequences; "decode", of one token a sequence over a past; "train",
            the forward pass and all gradients.
        batch, sequence: sequences, and the tokens of each; in decoding those of the past.
        system, mode: `systems.SYSTEMS` and `systems.MODES` explain them.
        device: "cpu" (only checked) or "cuda" (any GPU).
        status: "ok", "wrong", "unsupported" or "error"; `reason` says more.
        error: how far the worst tensor is from the whole model's in a wider dtype, in parts of what rounding allows: of
            what is right it is at most 1.
        time_us: of a step in a burst, on the device, the slowest rank's median.
        time_min_us, time_max_us: the shortest and the longest round, each the slowest rank's.
        latency_us: of one step alone, as `time_us`.
        host_us: what it takes the host to queue a step; hidden from the times above.
        peak_bytes: of one rank: the parameters, and what a step allocates beside them; without the symmetric heap.
        speedup_vs_torch: the shortest `time_us` of torch's systems, in all modes of the same run, over this one.
        limit_over_time: the shortest `time_us` of "no_communication" over this one.
        timestamp: when it was measured, UTC.
    """

    model: str
    layers: int
    phase: str
    batch: int
    sequence: int
    system: str
    mode: str
    dtype: str
    world_size: int
    device: str
    device_name: str
    status: str
    error: float | None
    time_us: float | None
    time_min_us: float | None
    time_max_us: float | None
    latency_us: float | None
    host_us: float | None
    peak_bytes: int | None
    speedup_vs_torch: float | None
    limit_over_time: float | None
    rounds: int
    burst: int
    seed: int
    torch: str
    transformers: str
    triton: str
    driver: str
    commit: str
    timestamp: str
    command: str
    reason: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells measurements of different things apart."""
        return (self.system, self.mode, *self.step_key)

    @property
    def thing(self) -> tuple[Any, ...]:
        """What was measured, and on which kind of device."""
        return (*self.key, self.device_name)

    @property
    def step_key(self) -> tuple[Any, ...]:
        """What all rows of one step have in common."""
        sizes = (self.model, self.layers, self.phase, self.batch, self.sequence)
        return (*sizes, self.world_size, self.dtype, self.device)
