"""`iris-bench layers`: layers that are right are timed, in all layouts and phases, and what is wrong is said."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks, context
from torch import nn
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.layers import rank as bench
from iris_bench.layers import subjects
from iris_bench.layers.cli import plan
from iris_bench.layers.record import LayersRecord
from iris_core import RankPool

JOB = bench.Job(
    tokens=8,
    width=12,
    features=16,
    layout="sequence",
    phases=bench.PHASES,
    subjects=(subjects.ALONE, "torch", "async_tp", "iris"),
    dtype="float32",
    rounds=1,
    burst=1,
    seed=3,
)
on_cpu = pytest.mark.parametrize("device", ["cpu"])


def measured(rank: int, world_size: int, job: bench.Job, spoil: str = "") -> list[bench.Outcome]:
    """Measure; `spoil` one gradient, or the output, of our layers on the last rank."""
    make = subjects.make

    def made(ctx: Any, subject: str, *args: Any) -> nn.Module:
        layers = make(ctx, subject, *args)
        if subject == "iris" and rank == world_size - 1:
            if spoil == "output":
                layers.register_forward_hook(lambda module, inputs, output: output + 1e-3)
            elif spoil == "gradient":
                layers.down.register_parameter("weight", nn.Parameter(layers.down.weight.detach()))
                layers.down.weight.register_hook(lambda grad: grad * 1.001)
        return layers

    with mock.patch.object(bench, "context", context), mock.patch.object(subjects, "make", made):
        return bench.measure(rank, world_size, job)


@on_cpu
@pytest.mark.parametrize("layout", subjects.LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_are_checked_and_timed(ranks: Callable[[int], Ranks], world_size: int, layout: str) -> None:
    outcomes = ranks(world_size).call(measured, replace(JOB, layout=layout))
    assert all(one == outcomes[0] for one in outcomes)
    assert [(one.phase, one.subject) for one in outcomes[0]] == [
        (phase, subject) for phase in bench.PHASES for subject in JOB.subjects
    ]
    for one in outcomes[0]:
        assert one.status == ("unsupported" if one.subject == "async_tp" else "ok"), one.reason
        assert (one.time_us is not None) == (one.status == "ok")
        assert (one.error is not None) == (one.subject in ("torch", "iris"))
        assert one.error is None or one.error < 1e-5


@on_cpu
@pytest.mark.parametrize(("spoil", "phases"), [("output", {"forward", "step"}), ("gradient", {"step"})])
def test_what_is_wrong_is_not_timed(ranks: Callable[[int], Ranks], spoil: str, phases: set[str]) -> None:
    """Off by a thousandth, on one rank of two."""
    for outcomes in ranks(2).call(measured, JOB, spoil):
        assert {one.phase for one in outcomes if one.status == "wrong"} == phases
        for one in outcomes:
            if one.status == "wrong":
                assert one.subject == "iris"
                assert one.time_us is None
                assert "off by" in one.reason


def fail_alone(rank: int, world_size: int) -> Any:
    def made(ctx: Any, subject: str, *args: Any) -> nn.Module:
        raise RuntimeError("no layers here") if rank else ValueError("none there")

    with mock.patch.object(bench, "context", context), mock.patch.object(subjects, "make", made):
        return bench.measure(rank, world_size, replace(JOB, phases=("forward",), subjects=("torch",)))


@on_cpu
def test_what_cannot_be_made_has_its_reason(ranks: Callable[[int], Ranks]) -> None:
    for (one,) in ranks(2).call(fail_alone):
        assert (one.status, one.reason) == ("unsupported", "none there")


def test_a_pass_that_fuses_nothing_is_found() -> None:
    x = torch.ones(4, 4)
    for name in subjects._FUSED_BY_TORCH:
        assert name in subjects.why_not_fused(lambda: x @ x)

    def both() -> None:
        for name in subjects._FUSED_BY_TORCH:
            with torch.profiler.record_function(name):
                x @ x

    assert subjects.why_not_fused(both) == ""


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
        ({"blocks": "8x12"}, "unknown shape '8x12'"),
        ({"blocks": "6x12x16"}, "6x12x16 on 4 ranks: 6 must be a multiple of these"),
        ({"blocks": "8x12x18"}, "18 must be"),
        ({"blocks": "8x10x16", "layouts": ("replicated",)}, "10 must be"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'; known dtypes: bf16, fp16, fp32"),
        ({"rounds": 0}, "--rounds 0 makes no sense"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(**(GIVEN | change))


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
    for theirs, ours in (rows[:2], rows[2:]):
        assert float(theirs["speedup_vs_torch"]) == 1
        speedup = float(theirs["time_us"]) / float(ours["time_us"])
        assert float(ours["speedup_vs_torch"]) == pytest.approx(speedup, rel=1e-4)
    picture = (tmp_path / "layers.svg").read_text()
    assert "<svg" in picture
    again = CliRunner().invoke(cli.app, command)
    assert again.exit_code == 2
    assert "--overwrite replaces it" in again.output


def test_a_picture_needs_what_it_compares_with(tmp_path: Path) -> None:
    command = ["layers", "--device", "cpu", "--subject", "iris", "--plot"]
    for name, said in (("layers.svg", "--plot shows speedups over torch"), ("layers.txt", "end its name in .png")):
        done = CliRunner().invoke(cli.app, [*command, str(tmp_path / name)])
        assert done.exit_code == 2
        assert said in done.output


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
        assert ("what was there" in out.read_text()) == (so_far == 0)
        assert len(out.read_text().splitlines()) == 1 + so_far


@pytest.mark.parametrize("option", ["--subject", "--layout", "--phase"])
def test_an_unknown_name_is_refused(option: str) -> None:
    done = CliRunner().invoke(cli.app, ["layers", "--device", "cpu", option, "nonsense"])
    assert done.exit_code == 2
    assert f"unknown {option} 'nonsense'; it takes 'all', or some of" in done.output


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_layers_are_measured_on_gpus(ranks: Callable[[int], Ranks]) -> None:
    """Torch's overlapping pass, too, which fuses or is said not to."""
    job = replace(JOB, tokens=512, width=512, features=1024, dtype="bfloat16", subjects=tuple(subjects.SUBJECTS))
    for one in ranks(2).call(measured, job)[0]:
        assert one.status == "ok" or one.subject == "async_tp", one.reason
        assert one.status in ("ok", "unsupported")
