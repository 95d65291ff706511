"""`iris-bench ccl`: both libraries' collectives are checked and timed, and what is wrong is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from ranks import Ranks as Pool
from ranks import context
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.benchmarks.ccl import rank as ccl
from iris_bench.benchmarks.ccl.plot import speedups
from iris_bench.benchmarks.ccl.record import CclRecord, Outcome
from iris_bench.command.ranks import Ranks
from iris_bench.records.record import read_as

PLAN = ccl.Plan(sizes=(100, 3000), kinds=ccl.KINDS, rounds=1, burst=1, seed=3)


def measured(rank: int, world_size: int, broken: str, how: str = "wrong") -> list[Outcome]:
    """Measure; a collective that is broken leaves the last element on the last rank, or raises on all of them."""
    ctx = context()

    class Broken:
        def __getattr__(self, name: str) -> Any:
            call = getattr(ctx.ccl, name)

            def forget(output: Any, given: Any, config: Any) -> None:
                if name == broken and how == "error":
                    raise RuntimeError("out of memory")
                call(output, given, config=config)
                if name == broken and rank == world_size - 1:
                    output[-1:].fill_(77)

            return forget if name in ccl.KINDS else call

    fake = mock.Mock(wraps=ctx, ccl=Broken(), control_plane=ctx.control_plane)
    with mock.patch.object(ccl, "context", return_value=fake):
        return ccl.measure(rank, world_size, PLAN)


@pytest.mark.parametrize(("broken", "how"), [("", ""), ("all_gather", "wrong"), ("reduce", "error")])
def test_every_collective_of_both_libraries(ranks: Any, broken: str, how: str) -> None:
    """What fails is a row, and the others are measured."""
    found: Pool = ranks(2)
    outcomes = found.call(measured, broken, how)
    assert outcomes[0] == outcomes[1]
    assert {(one.kind, one.library) for one in outcomes[0]} == {
        (kind, library) for kind in ccl.KINDS for library in ("iris", "nccl" if found.device == "cuda" else "gloo")
    }
    assert {one.bytes for one in outcomes[0]} == {64, 2944}
    for one in outcomes[0]:
        is_broken = (one.kind, one.library) == (broken, "iris")
        assert one.status == (how if is_broken else "ok"), one
        assert ("rank" in one.reason if how == "wrong" else "out of memory" in one.reason) == is_broken
        assert (one.time_us is None) == is_broken


def measured_without_memory(rank: int, world_size: int) -> tuple[list[Outcome], int]:
    """Measure where there is no memory for one input; return what is left on the heap, too."""
    ctx, drawn = context(), ccl._drawn

    def draw(ctx: Any, kind: str, *args: int) -> Any:
        if kind == "gather":
            raise RuntimeError("out of memory")
        return drawn(ctx, kind, *args)

    ctx.ccl.prepare()
    before = ctx.heap.allocator.used_bytes
    with mock.patch.object(ccl, "context", context), mock.patch.object(ccl, "_drawn", draw):
        outcomes = ccl.measure(rank, world_size, replace(PLAN, kinds=("gather", "scatter")))
    return outcomes, ctx.heap.allocator.used_bytes - before


def test_a_collective_that_cannot_be_tried_is_an_error(ranks: Any) -> None:
    for outcomes, left in ranks(2).call(measured_without_memory):
        assert {(one.kind, one.status) for one in outcomes} == {("gather", "error"), ("scatter", "ok")}
        assert left == 0


def test_the_command_writes_rows_a_table_and_a_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "ccl.csv", tmp_path / "ccl.svg"
    arguments = ["ccl", "--world-size", "2", "--device", "cpu", "--kib", "1", "--kind", "broadcast"]
    done = CliRunner().invoke(cli.app, [*arguments, "--out", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert "broadcast" in done.output
    assert plot.read_text().startswith("<?xml")
    assert [record.library for record in read_as(out, CclRecord)] == ["iris", "gloo"]


def test_resuming_measures_what_is_missing_or_failed(tmp_path: Path) -> None:
    out = tmp_path / "ccl.csv"
    arguments = ["ccl", "--world-size", "2", "--device", "cpu", "--kind", "reduce,gather", "--out", str(out)]
    assert CliRunner().invoke(cli.app, [*arguments, "--kib", "1"]).exit_code == 0
    out.write_text(out.read_text().replace("gather,gloo,eager,,,1024,", "gather,gloo,eager,,,2048,"))
    done = CliRunner().invoke(cli.app, [*arguments, "--kib", "1,4", "--resume"])
    assert done.exit_code == 0, done.output
    added = read_as(out, CclRecord)[4:]
    assert [(one.kind, one.library, one.bytes) for one in added] == [
        *(("reduce", library, 4096) for library in ("iris", "gloo")),
        *(("gather", library, size) for size in (1024, 4096) for library in ("iris", "gloo")),
    ]
    before = out.read_text()
    assert CliRunner().invoke(cli.app, [*arguments, "--kib", "4", "--resume"]).exit_code == 0
    assert out.read_text() == before


def test_of_what_was_measured_again_the_last_counts(tmp_path: Path) -> None:
    out = tmp_path / "ccl.csv"
    arguments = ["ccl", "--world-size", "2", "--device", "cpu", "--kib", "1", "--kind", "reduce", "--out", str(out)]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    iris, gloo = read_as(out, CclRecord)
    (row,) = speedups([iris, gloo, replace(iris, time_us=2.0), replace(gloo, time_us=6.0)]).to_dict("records")
    assert (row["iris"], row["other"], row["speedup"]) == (2.0, 6.0, 3.0)


def test_variants_and_programs_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "ccl.csv"
    arguments = ["ccl", "--world-size", "2", "--device", "cpu", "--kib", "1", "--kind", "all_reduce,reduce_scatter"]
    arguments += ["--variant", "two_shot,gathered,pipelined", "--comm-sms", "1,2", "--out", str(out)]
    with mock.patch.dict("os.environ", COLUMNS="200"):
        done = CliRunner().invoke(cli.app, [*arguments, "--plot", str(tmp_path / "ccl.svg")])
    assert done.exit_code == 0, done.output
    assert "all_reduce (two_shot, 2 programs)" in done.output
    records = read_as(out, CclRecord)
    assert [(one.kind, one.variant, one.comm_sms) for one in records] == [
        *(("all_reduce", variant, programs) for variant in ("two_shot", "gathered") for programs in (1, 2)),
        ("all_reduce", "", None),
        *(("reduce_scatter", "pipelined", programs) for programs in (1, 2)),
        ("reduce_scatter", "", None),
    ]
    assert {one.status for one in records} == {"ok"}


def test_rows_without_a_variant_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ccl.csv"
    arguments = ["ccl", "--world-size", "2", "--device", "cpu", "--kib", "1", "--kind", "reduce", "--out", str(path)]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    frame = pd.read_csv(path).drop(columns=["variant", "comm_sms"])
    frame.to_csv(path, index=False)
    records = read_as(path, CclRecord)
    assert [(one.library, one.variant, one.comm_sms) for one in records] == [("iris", "", None), ("gloo", "", None)]
    assert list(speedups(records).way) == ["reduce"]


class Interrupted(Ranks):
    """Ranks whose command is interrupted in the second measurement."""

    is_first = True

    def __init__(self) -> None:
        self.plans: list[ccl.Plan] = []

    def call(self, fn: Any, *args: Any) -> Any:
        if fn is not ccl.measure:
            return {"device_name": "H100", "driver": ""}
        (plan,) = args
        self.plans.append(plan)
        if len(self.plans) == 2:
            raise KeyboardInterrupt
        return [
            Outcome(*plan.kinds, "iris", "eager", "auto", None, *plan.sizes, 12.0, 12.0, 3.0, "ok", plan.rounds, "")
        ]

    def close(self, *, kill: bool = False) -> None:
        assert kill


def test_an_interrupted_command_has_written_its_rows(tmp_path: Path) -> None:
    out, ranks = tmp_path / "ccl.csv", Interrupted()
    arguments = ["ccl", "--world-size", "2", "--device", "cpu", "--kib", "1,2", "--kind", "reduce", "--out", str(out)]
    with mock.patch("iris_bench.command.jobs.start_ranks", return_value=ranks):
        done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 130, done.output
    assert "[1/2] reduce of 1 KiB: iris eager 12.0 us" in done.output
    assert f"1 rows were written to {out}" in done.output
    assert [(record.kind, record.bytes, record.rounds) for record in read_as(out, CclRecord)] == [("reduce", 1024, 1)]
    assert [plan.sizes for plan in ranks.plans] == [(1024,), (2048,)]


def test_what_makes_no_sense_is_refused() -> None:
    for arguments, said in (
        (["--kib", "no"], "--kib no"),
        (["--kind", "scan"], "scan: there are all_reduce"),
        (["--variant", "tree"], "tree: there are all, auto"),
        (["--variant", "ring", "--kind", "reduce"], "reduce has none of them, but auto"),
        (["--comm-sms", "1,0"], "--comm-sms 1,0"),
    ):
        done = CliRunner().invoke(cli.app, ["ccl", "--device", "cpu", *arguments])
        assert done.exit_code == 2
        assert said in done.output
