"""No wrong variant gets through a measurement: it is found out, and not timed."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from iris_bench.measure import job as measure
from iris_bench.measure.shapes import Shape
from iris_core import PeerError, RankPool
from iris_kernels.common.operators.operator import Operator
from iris_kernels.common.variants.library import library_variant
from iris_kernels.gemm_all_scatter import library
from overlap_taxonomy import Variant, register


def stale(call: Any, calls: int, output: torch.Tensor, kept: torch.Tensor) -> None:
    if calls == 2:
        output.copy_(kept)


def one_element(call: Any, calls: int, output: torch.Tensor, kept: torch.Tensor) -> None:
    if call.rank == 1:
        output[2, 1] += 1


def raises(call: Any, calls: int, output: torch.Tensor, kept: torch.Tensor) -> None:
    raise RuntimeError("no luck")


def refuses(ctx: Any, problem: Any) -> None:
    raise ValueError("not on this device")


def broken_variant(name: str, spoil: Callable[..., None], open: Callable[..., Any]) -> Variant:
    """Return a variant that is right, but for what `spoil` does to its output."""
    calls = itertools.count(1)

    def launch(call: Any, a: torch.Tensor, b: torch.Tensor) -> None:
        kept = library.matrix_of(call)[0].clone()
        library.launch_layout(call, a, b)
        (output,) = library.matrix_of(call)
        spoil(call, next(calls), output, kept)

    return library_variant(
        "gemm_all_scatter",
        name,
        launch,
        workspace=library.layout_workspace,
        outputs=library.matrix_of,
        open=open,
        summary="broken",
    )


def measure_broken_variants(rank: int, world_size: int) -> list[measure.Outcome]:
    broken = {"stale": stale, "one_element": one_element, "raises": raises, "refuses": raises}
    for name, spoil in broken.items():
        open_group = refuses if name == "refuses" else lambda ctx, problem: ctx.process_group()
        register(broken_variant(name, spoil, open_group))
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


def measure_over_hosts(rank: int, world_size: int) -> tuple[list[str], int]:
    """Measure as where graphs hold calls of operators inside hosts; return what came of it, and how many are left."""
    measure.open_rank(rank, world_size, 1 << 22, "cpu")
    names = ("workgroup_specialized:portable",)
    job = measure.Job("gemm_all_reduce", names, Shape(5, 3, 2), "float32", world_size, 0, 1, 1, timed=False)
    with mock.patch.object(Operator, "was_captured", True):
        outcomes = measure.measure(rank, world_size, job)
    left = len(measure.context().local.operators)
    measure.close_rank(rank, world_size)
    return [one.status for one in outcomes], left


def test_operators_inside_hosts_are_given_back() -> None:
    with RankPool(2, "cpu", hosts=2) as pool:
        assert pool.call(measure_over_hosts) == [(["ok"], 0)] * 2


def crash(rank: int, world_size: int) -> None:
    measure.open_rank(rank, world_size, 1 << 20, "cpu")
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_crashes_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    with RankPool(1, "cpu") as pool, pytest.raises(PeerError, match="SIGSEGV"):
        pool.call(crash)
    assert re.search(
        r"Segmentation fault.*test_bench_measure\.py\", line \d+ in crash", capfd.readouterr().err, re.DOTALL
    )
