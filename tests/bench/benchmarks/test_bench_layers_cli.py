"""`iris-bench layers` as a command: what it refuses, its rows, its table and picture, and what it leaves."""

from __future__ import annotations

import csv
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.benchmarks.layers import rank as bench
from iris_bench.benchmarks.layers.cli import print_layers
from iris_bench.benchmarks.layers.plan import heap_bytes, plan, still_to_do, to_records
from iris_bench.benchmarks.layers.plot import plot_layers
from iris_bench.benchmarks.layers.record import LayersRecord
from iris_bench.measure import environment
from iris_bench.records.csv_rows import append_records
from iris_bench.records.record import read_as
from iris_core import RankPool

GIVEN: dict[str, Any] = {
    "blocks": "8x12x16",
    "subjects": ("torch",),
    "layouts": ("sequence",),
    "phases": ("step",),
    "dtype": "fp32",
    "rounds": 1,
    "burst": 1,
    "seed": 0,
    "world_size": 4,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks": "8x12"}, "unknown block '8x12'; it takes TOKENSxWIDTHxFEATURES"),
        ({"blocks": "llama"}, "unknown block 'llama'"),
        ({"burst": 0}, "--burst 0 makes no sense"),
        ({"blocks": "6x12x16"}, "block 6x12x16: its tokens, 6, must be a multiple of the 4 ranks"),
        ({"blocks": "8x12x18"}, "its features, 18, must be"),
        ({"blocks": "8x10x16", "layouts": ("replicated",)}, "its width, 10, must be"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'; known dtypes: bf16, fp16, fp32"),
        ({"rounds": 0}, "--rounds 0 makes no sense"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(**(GIVEN | change))


def test_a_block_that_is_named_twice_is_measured_once() -> None:
    assert len(plan(**(GIVEN | {"blocks": "8x12x16, 8x12x16,8x12x16 "}))) == 1


def test_replicated_tokens_need_not_divide() -> None:
    (job,) = plan(**(GIVEN | {"blocks": "7x12x16", "layouts": ("replicated",)}))
    assert (job.tokens, job.width, job.features, job.dtype) == (7, 12, 16, "float32")


def test_the_command_writes_rows_and_a_table(tmp_path: Path) -> None:
    out = tmp_path / "layers.csv"
    command = ["layers", "--device", "cpu", "--world-size", "2", "--blocks", "8x12x16", "--subject", "torch,iris"]
    command += ["--layout", "replicated", "--out", str(out), "--plot", str(tmp_path / "layers.svg")]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "8 tokens, 12 to 16 and back, replicated, step, fp32" in done.output
    assert "interpreted: times are not performance" in " ".join(done.output.split())
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [column.name for column in fields(LayersRecord)]
    assert [(row["phase"], row["subject"], row["status"]) for row in rows] == [
        (phase, subject, "ok") for phase in bench.PHASES for subject in ("torch", "iris")
    ]
    assert all(float(row["time_us"]) > 0 and row["host_us"] == row["speedup_vs_torch"] == "" for row in rows)
    picture = (tmp_path / "layers.svg").read_text()
    assert "<svg" in picture
    again = CliRunner().invoke(cli.app, command)
    assert again.exit_code == 2
    assert "--resume goes on with it, --overwrite replaces it" in again.output


def test_resuming_measures_pairs_of_which_a_row_is_missing_or_failed(tmp_path: Path) -> None:
    """Whole, as its times are of one run; and shows those that are there, too."""
    out = tmp_path / "layers.csv"
    out.touch()  # as an interrupt may leave it
    command = ["layers", "--device", "cpu", "--world-size", "2", "--subject", "torch,iris", "--out", str(out)]
    command += ["--layout", "replicated", "--phase", "forward", "--resume", "--blocks"]
    assert CliRunner().invoke(cli.app, [*command, "8x12x16"]).exit_code == 0
    first = out.read_text()
    again = CliRunner().invoke(cli.app, [*command, "8x12x16", "--plot", str(tmp_path / "layers.svg")])
    assert again.exit_code == 0, again.output
    assert "8 tokens, 12 to 16 and back" in again.output
    assert out.read_text() == first
    assert "8 tokens" in (tmp_path / "layers.svg").read_text()
    out.write_text(
        first.replace("iris,replicated,forward,8,12,16,2,fp32,cpu", "iris,replicated,forward,8,12,16,4,fp32,cpu")
    )
    both = CliRunner().invoke(cli.app, [*command, "8x12x16,4x12x16", "--seed", "3"])
    assert both.exit_code == 0, both.output
    assert "it has seed 0 (now 3)" in both.output
    rows = read_as(out, LayersRecord)
    assert [(row.subject, row.tokens, row.features) for row in rows[2:]] == [
        (subject, tokens, 16) for tokens in (8, 4) for subject in ("torch", "iris")
    ]
    assert "4 tokens, 12 to 16" in both.output
    assert "fp32, 4 x" not in both.output


SETTING = {"world_size": 4, "device": "cuda"}
ROW = {"device_name": "a GPU", "driver": "", "commit": "", "command": "", **SETTING, **environment.versions()}


def rows_of(subject: str, phase: str, **changes: Any) -> list[LayersRecord]:
    (job,) = plan(**GIVEN)
    outcome = bench.Outcome(subject, phase, time_us=1.0)
    return [replace(row, **changes) for row in to_records(job, [outcome], ROW)]


@pytest.mark.parametrize(
    ("changes", "is_done"),
    [
        ({}, True),
        ({"time_us": None}, False),
        ({"status": "error", "time_us": None}, False),
        ({"status": "wrong", "time_us": None}, False),
        ({"status": "unsupported", "time_us": None}, True),
        ({"status": "unsupported", "time_us": None, "torch": "2.11.0"}, False),
        ({"dtype": "bf16"}, False),
        ({"world_size": 2}, False),
    ],
)
def test_what_is_done_of_a_pair(changes: dict[str, Any], is_done: bool) -> None:
    jobs = plan(**GIVEN)
    assert still_to_do(jobs, rows_of("torch", "step", **changes), SETTING) == ([] if is_done else jobs)


def test_a_phase_is_measured_with_all_subjects_that_it_has() -> None:
    """So that its speedups are of one run; a phase that is finished is left alone."""
    done = [*rows_of("torch", "step"), *rows_of("iris", "forward"), *rows_of("async_tp", "forward")]
    (job,) = plan(**(GIVEN | {"subjects": ("iris",), "phases": ("forward", "step")}))
    (left,) = still_to_do([job], done, SETTING)
    assert (left.phases, left.subjects) == (("step",), ("torch", "iris"))


def test_tables_have_all_subjects_in_their_order() -> None:
    rows = [*rows_of("iris", "step"), *rows_of("iris", "step", tokens=4), *rows_of("torch", "step")]
    console = Console(record=True, width=120)
    print_layers(console, rows)
    said = console.export_text()
    assert said.count("12 to 16 and back") == 2
    assert re.search(r"8 tokens.*?torch .*?iris .*?4 tokens.*?iris ", said, re.DOTALL)


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (("a processor", "another one"), [], "rows of another one, whose times these would be compared with"),
        ((",1,1,0,", ",1,2,0,"), [], "--burst 1, but the file to go on with has times of bursts of 2"),
        ((",ok,,1,", ",ok,,nan,"), [], "time_us is nan; it is positive and finite, or empty"),
        ((",8,12,16,", ",8,0,16,"), [], "width is 0; it is at least 1"),
        (("subject,", "family,"), [], "its columns differ (missing: subject; unknown: family)"),
        (("", ""), ["--overwrite"], "--resume keeps the rows of --out and --overwrite drops them"),
    ],
)
def test_what_is_not_gone_on_from(tmp_path: Path, change: tuple[str, str], given: list[str], said: str) -> None:
    (job,) = plan(**(GIVEN | {"world_size": 1}))
    columns = dict.fromkeys(("torch", "triton", "driver", "commit", "command"), "")
    columns |= {"world_size": 1, "device": "cpu", "device_name": "a processor"}
    out = tmp_path / "layers.csv"
    append_records(out, to_records(job, [bench.Outcome("torch", "step", time_us=1.0)], columns))
    text = out.read_text()
    assert change[0] in text
    out.write_text(text.replace(*change))
    command = ["layers", "--device", "cpu", "--world-size", "1", "--out", str(out), "--resume", "--blocks", "4x4x4"]
    done = CliRunner().invoke(cli.app, [*command, *given])
    assert done.exit_code
    assert said in " ".join(done.output.split())


def test_a_picture_needs_what_it_compares_with(tmp_path: Path) -> None:
    command = ["layers", "--device", "cpu", "--subject", "iris", "--plot"]
    for name, said in (("layers.svg", "--plot shows speedups over torch"), ("layers.txt", "end its name in .png")):
        done = CliRunner().invoke(cli.app, [*command, str(tmp_path / name)])
        assert done.exit_code == 2
        assert said in done.output


def test_speedups_are_over_torch_in_the_same_phase() -> None:
    (job,) = plan(**(GIVEN | {"phases": ("forward", "step")}))
    outcomes = [
        bench.Outcome(subject, phase, time_us=time_us)
        for phase, times in (("forward", (4.0, 2.0)), ("step", (9.0, 3.0)))
        for subject, time_us in zip(("torch", "iris"), times, strict=True)
    ]
    outcomes.append(bench.Outcome("async_tp", "step", status="unsupported"))
    columns = dict.fromkeys(("device_name", "torch", "triton", "driver", "commit", "command"), "")
    of_gpus = to_records(job, outcomes, {**columns, "world_size": 4, "device": "cuda"})
    assert [one.speedup_vs_torch for one in of_gpus] == [1, 2, 1, 3, None]
    of_cpus = to_records(job, outcomes, {**columns, "world_size": 4, "device": "cpu"})
    assert [one.speedup_vs_torch for one in of_cpus] == [None] * 5


def test_a_picture_shows_what_has_no_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = plan(**(GIVEN | {"phases": ("forward",)}))
    outcomes = [bench.Outcome(subject, "forward", time_us=4.0) for subject in ("products_alone", "torch")]
    outcomes += [
        bench.Outcome("async_tp", "forward", status="unsupported"),
        bench.Outcome("iris", "forward", status="wrong"),
    ]
    columns = dict.fromkeys(("device_name", "torch", "triton", "driver", "commit", "command"), "")
    records = to_records(job, outcomes, {**columns, "world_size": 4, "device": "cuda"})
    figures: list[Figure] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    plot_layers(records, tmp_path / "layers.svg")
    (figure,) = figures
    said = [text.get_text().strip() for text in figure.axes[0].texts]
    assert {"unsupported", "wrong"} <= set(said)
    drawn = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for part in (*figure.legends, *filter(None, [figure._suptitle])):
        place = part.get_window_extent(drawn)
        assert place.x0 >= 0
        assert place.x1 <= figure.bbox.width


def test_the_heap_holds_what_the_operators_take() -> None:
    """In bf16 twice what all-gather has of all tokens, and twice a doubled workspace; or all-reduce's."""
    (job,) = plan(**(GIVEN | {"blocks": "8192x8192x28672", "dtype": "bf16"}))
    assert heap_bytes(job, 4) > 6 * 8192 * 8192 * 2
    assert heap_bytes(replace(job, layout="replicated"), 8) > 17 * 8192 * 8192 * 2


@pytest.mark.parametrize(("status", "exit_code"), [("ok", 0), ("unsupported", 0), ("wrong", 1), ("error", 1)])
def test_the_exit_status_says_if_anything_failed(status: str, exit_code: int) -> None:
    call = RankPool.call

    def answer(self: RankPool, fn: Any, *args: Any) -> Any:
        if fn is not bench.measure:
            return call(self, fn, *args)
        return [[bench.Outcome("torch", "forward"), bench.Outcome("iris", "forward", status=status, reason="so it is")]]

    with mock.patch.object(RankPool, "call", answer):
        done = CliRunner().invoke(cli.app, ["layers", "--device", "cpu", "--world-size", "1", "--layout", "sequence"])
    assert done.exit_code == exit_code
    assert "iris: so it is" in done.output


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("lost")])
def test_rows_are_kept_when_the_command_ends_early(tmp_path: Path, error: BaseException) -> None:
    """What was to be replaced is, once there are rows; not before."""
    out = tmp_path / "layers.csv"
    out.write_text("what was there\n")
    call, command = RankPool.call, ["layers", "--device", "cpu", "--world-size", "1", "--blocks", "8x12x16"]
    command += ["--subject", "torch", "--phase", "forward", "--overwrite", "--out", str(out)]
    for so_far in (0, 1):
        jobs = so_far

        def fail(self: RankPool, fn: Any, *args: Any) -> Any:
            nonlocal jobs
            if fn is bench.measure:
                jobs -= 1
                if jobs < 0:
                    raise error
            return call(self, fn, *args)

        with mock.patch.object(RankPool, "call", fail):
            done = CliRunner().invoke(cli.app, command)
        is_interrupt = isinstance(error, KeyboardInterrupt)
        assert done.exit_code == (130 if is_interrupt else 1), done.output
        left = "1 rows were written to" if so_far else "nothing was written"
        assert (left if is_interrupt else "ended early: RuntimeError: lost") in done.output
        rows = out.read_text().splitlines()
        if is_interrupt:
            assert rows == ["what was there"] if not so_far else len(rows) == 2
        else:  # a row for what it ended in
            assert len(rows) == 2 + so_far
            assert ",error," in rows[-1]
            assert "the measurement ended here: RuntimeError: lost" in rows[-1]


@pytest.mark.parametrize("option", ["--subject", "--layout", "--phase"])
def test_an_unknown_name_is_refused(option: str) -> None:
    done = CliRunner().invoke(cli.app, ["layers", "--device", "cpu", option, "nonsense"])
    assert done.exit_code == 2
    assert f"unknown {option} 'nonsense'; it takes 'all', or some of" in done.output
