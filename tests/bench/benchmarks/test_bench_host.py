"""`iris-bench host`: calls are checked in every way, and are of the kind that their times are said to be of."""

from __future__ import annotations

import pstats
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks, context
from torch_compiling import if_it_compiles
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.benchmarks.host import cli as command
from iris_bench.benchmarks.host import rank as host
from iris_bench.benchmarks.host.record import HostRecord, Outcome
from iris_bench.benchmarks.host.ways import IN_GRAPH, WAYS, Product, kinds_of
from iris_bench.measure import environment
from iris_bench.measure.environment import INTERPRETER_NAME
from iris_bench.measure.shapes import Shape
from iris_bench.records.csv_rows import append_records
from iris_bench.records.measured_on import MeasuredOn
from iris_bench.records.record import read_as
from iris_kernels.common.operators.operator import Operator

PATTERN = "workgroup_specialized:portable"
SHAPE = Shape(64, 16, 16)
ROWS = [(way, kind) for way in WAYS for kind in kinds_of(way)]
on_cpu = pytest.mark.parametrize("device", ["cpu"])


def plan_of(family: str, variant: str = PATTERN, *, shape: Shape = SHAPE, singles: int = 1) -> host.Plan:
    return host.Plan(family, shape, variant, 1, 2, singles, 0, "", 3)


def measure(rank: int, world_size: int, family: str, variant: str) -> tuple[list[Outcome], list[str]]:
    """Return what came of a family's ways, and how calls were not of the kind that they were timed as."""
    had, wrong = list[tuple[Operator[Any], int, int]](), list[str]()  # operators, with M and where B was
    call, time = Operator.call, host._Run._time

    def noted(self: Operator[Any], a: torch.Tensor, b: torch.Tensor, **others: Any) -> Any:
        had.append((self, others["m"], b.data_ptr()))
        return call(self, a, b, **others)

    def timed(self: Any, way: str, kind: str, calls: Sequence[Any]) -> None:
        first = len(had)
        time(self, way, kind, calls)
        for number in range(first, len(had)):
            operator, m, weight = had[number]
            had_at_m = {its_weight for its, its_m, its_weight in had[:number] if its is operator and its_m == m}
            is_whole, is_old = m == SHAPE.m, weight in had_at_m
            found = "new_m" if not had_at_m else "alone" if is_old and is_whole else "new_weight" if is_whole else "old"
            if found != ("alone" if kind == "cold" else kind):
                wrong.append(f"{way} {m} {kind}: {found}")
        if way != "mm" and len(had) - first != 2:
            wrong.append(f"{way} {kind}: {len(had) - first} calls")

    with (
        mock.patch.object(host, "context", context),
        mock.patch.object(Operator, "call", noted),
        mock.patch.object(host._Run, "_time", timed),
    ):
        outcomes, _ = host.measure(rank, world_size, plan_of(family, variant, singles=2))
    if context().operators:
        wrong.append("operators are kept")
    return outcomes, wrong


@on_cpu
@if_it_compiles
@pytest.mark.parametrize(
    ("family", "variant"), [("gemm_reduce_scatter", "auto"), ("all_gather_gemm", PATTERN), ("gemm_all_reduce", PATTERN)]
)
def test_each_kind_of_call_is_one(ranks: Any, family: str, variant: str) -> None:
    found: Ranks = ranks(2)
    for outcomes, wrong in found.call(measure, family, variant):
        assert wrong == []
        assert [(one.way, one.kind) for one in outcomes] == ROWS
        assert {one.status for one in outcomes} == {"ok"}, outcomes
        for one in outcomes:
            assert one.lowest_us is None or one.lowest_us <= one.median_us <= one.p90_us <= one.highest_us
            assert one.lowest_us is not None or one.way in IN_GRAPH
            expected = 8 if one.way in IN_GRAPH else 1 if one.way.startswith("graph") else 2
            assert one.calls == expected
            assert ("warps=" in one.config) == (one.way != "mm")


def measure_broken(rank: int, world_size: int) -> list[Outcome]:
    """Measure; on rank 1 an op is wrong, a layer returns what lies there from before, a graph one output twice."""
    made, last = Product.call, dict[str, torch.Tensor]()

    def broken(self: Product, way: str, weights: Sequence[torch.Tensor]) -> Any:
        call = made(self, way, weights)

        def of_way(a: torch.Tensor, m: int) -> Any:
            output = call(a, m)
            if way == "function":
                last["output"] = output.clone()
            if rank == 1:
                if way == "op":
                    output[-1, -1] *= 2
                if way == "layer":
                    return last["output"]
                if way == "graph_of_10_ops":
                    output[7] = output[7] * 2
            return output

        return of_way

    with mock.patch.object(host, "context", context), mock.patch.object(Product, "call", broken):
        return host.measure(rank, world_size, plan_of("gemm_reduce_scatter"))[0]


@on_cpu
@if_it_compiles
def test_what_is_wrong_on_any_rank_is_not_timed(ranks: Any) -> None:
    found: Ranks = ranks(2)
    for outcomes in found.call(measure_broken):
        for one in outcomes:
            expected = "wrong" if one.way in ("op", "layer", "graph_of_10_ops", "op_in_graph") else "ok"
            assert one.status == expected, one
            assert (one.median_us is None) == (expected == "wrong") or one.way in IN_GRAPH
            assert ("elements are wrong" in one.reason) == (expected == "wrong")


def measure_unsupported(rank: int, world_size: int) -> list[Outcome]:
    with mock.patch.object(host, "context", context):
        return host.measure(rank, world_size, plan_of("gemm_reduce_scatter", "warp_specialized:sm90"))[0]


@on_cpu
def test_a_variant_that_cannot_is_unsupported(ranks: Any) -> None:
    found: Ranks = ranks(2)
    for outcomes in found.call(measure_unsupported):
        assert {one.status for one in outcomes if one.way == "mm"} == {"ok"}
        assert {one.status for one in outcomes if one.way != "mm"} == {"unsupported"}


def records(m: int, **changed: Any) -> list[HostRecord]:
    """Return rows of a problem with M rows, as a command would have written them."""
    shared = {column.name: "" for column in fields(MeasuredOn)} | {"world_size": 2, "burst": 2, "seed": 0}
    shared |= {"device": "cpu", "device_name": INTERPRETER_NAME, "command": "iris-bench host"}
    made = {"family": "gemm_reduce_scatter", "m": m, "n": 16, "k": 16, "variant": "auto", "status": "ok"}
    made |= {
        "median_us": 2.0,
        "lowest_us": 1.0,
        "p90_us": 3.0,
        "highest_us": 4.0,
        "calls": 5,
        "reason": "",
        "config": "",
    }
    return [HostRecord(**(shared | made | {"way": way, "kind": kind} | changed)) for way, kind in ROWS]


@if_it_compiles
def test_the_command_goes_on_with_a_file_and_writes_profiles(tmp_path: Path) -> None:
    out, folder = tmp_path / "host.csv", tmp_path / "profiles"
    append_records(out, records(64))
    before = out.read_text()
    arguments = ["host", "--world-size", "2", "--device", "cpu", "--family", "gemm_reduce_scatter", "--out", str(out)]
    arguments += ["--resume", "--shapes", "64x16x16,2x16x16", "--profile", str(folder)]
    with mock.patch.dict("os.environ", COLUMNS="200"):
        done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert out.read_text().startswith(before)
    rows = read_as(out, HostRecord)
    assert [(one.m, one.way, one.kind) for one in rows] == [(m, *row) for m in (64, 2) for row in ROWS]
    # Of two rows there are no other numbers of rows that are multiples of the ranks.
    assert {one.kind for one in rows if one.status != "ok"} == {"new_m", "new_weight"}
    assert "torch op, one by one" in done.output
    ways = [way for way in WAYS if way not in IN_GRAPH]
    assert {path.name for path in folder.iterdir()} == {
        f"gemm_reduce_scatter_2x16x16_auto_{way}.pstats" for way in ways
    }
    for way, function, calls in (("mm", "mm", 10), ("operator", "call", 10), ("graph_of_2_ops", "call", 10)):
        (path,) = folder.glob(f"*_{way}.pstats")
        assert str(path) in done.output.replace("\n", "")
        stats: Any = pstats.Stats(str(path))
        counted = [row[0] for (file, _, name), row in stats.stats.items() if _is_of(file, name, function)]
        assert counted == [calls]
    assert re.search(r"\d\.\d\d us  <built-in method torch\.mm>", done.output)


def _is_of(file: str, name: str, function: str) -> bool:
    """Whether a function of a profile is torch.mm, or an operator's of this name."""
    return "torch.mm" in name if function == "mm" else (Path(file).name, name) == ("operator.py", function)


def test_only_what_is_missing_or_failed_is_measured() -> None:
    plans = [plan_of("gemm_reduce_scatter", "auto", shape=Shape(m, 16, 16)) for m in (64, 32, 16, 8)]
    done = [*records(64), *records(32)[1:], *records(16)[:-1], *records(16, status="wrong")[-1:]]
    assert command._left(plans, [*done, *records(8, world_size=4)], "cpu", 2) == plans[1:]
    now = environment.versions()
    same = {"status": "unsupported", "torch": now["torch"], "triton": now["triton"]}
    assert command._left(plans, [*done, *records(8, **same)], "cpu", 2) == plans[1:3]
    assert command._left(plans, [*done, *records(8, **same | {"triton": "2.0"})], "cpu", 2) == plans[1:]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--family", "gemm"], "--family gemm: there are all_gather_gemm"),
        (["--shapes", "33x64x64"], "--shapes 33x64x64: 33 must be a multiple of the 2 ranks"),
        (["--rounds", "0"], "--rounds 0 makes no sense"),
        (["--variant", "ring"], "ring"),
        (["--profile", "/dev/null/there"], "cannot write --profile /dev/null/there"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["host", "--device", "cpu", "--world-size", "2", *arguments])
    assert done.exit_code == 2, done.output
    assert said in done.output
