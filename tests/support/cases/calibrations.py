"""A machine of which nothing is known, its constants, and steps that measure those of a machine that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from iris_core import Context
from iris_kernels.common.calibration import calibrate
from iris_kernels.common.calibration.steps import STEPS, Sample
from overlap_taxonomy import assumed_machine

NEW = "NVIDIA B999"  # of which nothing is known
FACTS = {"gpu": NEW, "world_size": 2, "num_sms": 160, "l2_bytes": 1 << 20, "is_amd": False, "is_hopper": False}
ASSUMED = assumed_machine(**FACTS)
CONSTANTS = {"link_gbps": 500.0, "stream_k.memory_gbps": 6000.0, "tile_rates.128x128": 0.9}
OF_BYTES = tuple(step for step in STEPS if step.name in ("links", "the library's collectives"))


TRUE = assumed_machine(**FACTS | {"gpu": "NVIDIA H200"}).with_constants(
    {"link_gbps": 111.0, "engine_us": 20.0, "collective_gbps": 77.0, "small_collective_us": 11.0}
)


def as_if_on(machine: Any) -> Any:
    """Have each call take as long as it does on a machine, by the model; it is called all the same."""

    def times_us(ctx: Context, samples: Sequence[Sample]) -> list[float]:
        for sample in samples:
            sample.call()
        ctx.barrier()
        return [sample.predict(machine) for sample in samples]

    return mock.patch.object(calibrate, "_times_us", times_us)
