"""No wrong variant gets through a measurement: it is found out, and not timed."""

from __future__ import annotations

import math

import torch

from iris_bench.measure import job as measure
from iris_bench.measure.shapes import Shape
from iris_core import RankPool
from iris_kernels.gemm_all_scatter.library import LibraryLayout
from overlap_taxonomy import Agent, Arrangement, Sync, Variant, register


class _Broken(LibraryLayout):
    """Right, but for what its subclass does to the output."""

    calls = 0

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        kept = self._matrix.clone()
        output = super()._launch(a, b)
        self.spoil(output, kept)
        return output

    def spoil(self, output: torch.Tensor, kept: torch.Tensor) -> None:
        raise NotImplementedError


class _Stale(_Broken):
    def spoil(self, output: torch.Tensor, kept: torch.Tensor) -> None:
        if self.calls == 2:
            output.copy_(kept.view(len(output), -1)[:, : output.shape[1]])


class _OneElement(_Broken):
    def spoil(self, output: torch.Tensor, kept: torch.Tensor) -> None:
        if self.rank == 1:
            output[2, 1] += 1


class _Raises(_Broken):
    def spoil(self, output: torch.Tensor, kept: torch.Tensor) -> None:
        raise RuntimeError("no luck")


class _Refuses(_Broken):
    def _open(self) -> None:
        raise ValueError("not on this device")


def measure_broken_variants(rank: int, world_size: int) -> list[measure.Outcome]:
    broken = {"stale": _Stale, "one_element": _OneElement, "raises": _Raises, "refuses": _Refuses}
    for name, build in broken.items():
        register(
            Variant(
                "gemm_all_scatter",
                name,
                Arrangement.LIBRARY,
                Agent.LIBRARY,
                Sync.STREAM_ORDER,
                "broken",
                build,
                build.unsupported_reason,
            )
        )
    measure.open_rank(rank, world_size, 1 << 20, "cpu")
    job = measure.Job(
        family="gemm_all_scatter",
        variants=("library", *broken),
        shape=Shape(5, 3, 2),
        dtype="float32",
        world_size=world_size,
        seed=0,
        rounds=2,
        burst=3,
        timed=True,
    )
    outcomes = measure.measure(rank, world_size, job)
    measure.close_rank(rank, world_size)
    return outcomes


def test_broken_variants_are_found_out_and_not_timed() -> None:
    with RankPool(2, "cpu") as pool:
        by_rank = pool.call(measure_broken_variants)
    assert by_rank[0] == by_rank[1]
    outcomes = {outcome.variant: outcome for outcome in by_rank[0]}
    assert outcomes["library"].status == "ok"
    assert outcomes["library"].time_us > 0
    assert outcomes["library"].latency_us > 0
    assert outcomes["gemm_alone"].time_us > 0
    assert {name: outcome.status for name, outcome in outcomes.items() if outcome.status != "ok"} == {
        "stale": "wrong",
        "one_element": "wrong",
        "raises": "error",
        "refuses": "unsupported",
    }
    stale, element = outcomes["stale"], outcomes["one_element"]
    assert stale.reason.startswith("call 2, rank 0")
    assert "not finite" in stale.reason  # the poison, not an older output
    assert math.isinf(stale.error)
    assert element.reason.startswith("call 1, rank 1: 1 of 15 elements")
    assert "row 2, column 1" in element.reason
    assert "no luck" in outcomes["raises"].reason
    assert "not on this device" in outcomes["refuses"].reason
    assert all(outcome.time_us is None for outcome in outcomes.values() if outcome.status != "ok")
