"""Rows of a sweep that nobody measured, for tests of what is done with such rows."""

from __future__ import annotations

from unittest import mock

from iris_bench.benchmarks.links.measured import Link
from iris_bench.measure import environment, sweep
from iris_bench.measure.job import Outcome
from iris_bench.records.record import Record

LINK = Link(387.0, "--link-gbps")
ENVIRONMENT = {
    "device_name": "Some GPU",
    "driver": "1.2",
    "torch": "2",
    "triton": "3",
    "commit": "abc",
    "command": "iris-bench run",
}


def make_plan(*, device: str = "cuda", **changes) -> sweep.Plan:
    arguments = {
        "families": "gemm_all_scatter",
        "variants": "all",
        "shapes": "8192x8192x8192",
        "dtype": "bf16",
        "device": device,
        "world_size": 4,
        "seed": 0,
        "rounds": None,
        "burst": None,
        "timed": True,
        "link_gbps": 387.0,
    }
    return sweep.make_plan(**{**arguments, **changes})


def make_records(device: str = "cuda", shapes: str = "8192x8192x8192") -> list[Record]:
    """Return the rows of a sweep, the same whenever they are made."""
    records = []
    plan = make_plan(device=device, shapes=shapes)
    for job in plan.jobs:
        outcomes = [
            Outcome("library", correct=True, error=1e-3, time_us=700.0, latency_us=720.0, host_us=50.0),
            Outcome("copy_engine:portable", correct=True, error=1e-3, time_us=500.0, latency_us=520.0, host_us=50.0),
            Outcome(
                "fused_sequential:portable", status="wrong", correct=False, error=1.0, reason='12, or "13"\nelements'
            ),
            Outcome("gemm_alone", time_us=340.0, latency_us=350.0, host_us=10.0),
            Outcome("communication_alone", time_us=300.0, latency_us=310.0, host_us=10.0),
        ]
        with mock.patch.object(environment, "timestamp", return_value="2026-01-01T00:00:00Z"):
            records += sweep.to_records(plan, job, outcomes, ENVIRONMENT, LINK if device != "cpu" else Link(None, ""))
    return records
