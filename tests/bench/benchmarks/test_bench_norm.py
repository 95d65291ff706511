"""`iris-bench norm`: what is fused and what it is compared with are checked and timed, and what is wrong is said."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, context
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.baselines.project import Project
from iris_bench.benchmarks.norm import cli as command
from iris_bench.benchmarks.norm import rank as norm
from iris_bench.benchmarks.norm.others import FLASHINFER, OTHERS
from iris_bench.benchmarks.norm.record import NormRecord, Outcome
from iris_bench.measure.shapes import Shape
from iris_bench.records.measured_on import MeasuredOn
from iris_bench.records.record import read_as
from iris_kernels.common.portable.row_norm import RmsNorm

FUSED = "fused_sequential:portable:stream_k"


def measured(rank: int, world_size: int, normed_dtype: str, is_broken: bool) -> list[Outcome]:
    """Measure; broken, the kernel behind the collective norms with another eps."""
    plan = norm.Plan("gemm_all_reduce", Shape(9, 40, 24, ""), (FUSED,), normed_dtype, 1, 1, 3)
    add_and_norm, other = norm.add_and_norm, RmsNorm(1e3)

    def break_norm(c: Any, residual: Any, weight: Any, given: Any) -> Any:
        return add_and_norm(c, residual, weight, other if is_broken and rank == 1 else given)

    with mock.patch.object(norm, "context", context), mock.patch.object(norm, "add_and_norm", break_norm):
        return norm.measure(rank, world_size, plan)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(("normed_dtype", "is_broken"), [("", False), ("float8_e4m3fn", False), ("", True)])
def test_every_way_is_checked_and_timed(ranks: Any, normed_dtype: str, is_broken: bool) -> None:
    found: Ranks = ranks(2)
    outcomes = found.call(measured, normed_dtype, is_broken)
    assert [one.status for one in outcomes[0]] == [one.status for one in outcomes[1]]
    by_way = {one.way: one for one in outcomes[0]}
    assert list(by_way) == ["library", "unfused", "fused", *([] if normed_dtype else ["kraken"]), "flashinfer"]
    for way, one in by_way.items():
        expected = "unsupported" if way in OTHERS else "wrong" if is_broken and way == "unfused" else "ok"
        assert one.status == expected, one
        assert (one.time_us is None) == (expected != "ok")
    assert by_way["fused"].variant == FUSED
    if is_broken:
        assert "normed elements are wrong" in by_way["unfused"].reason


class FlashInfer:
    """What is in ``flashinfer.comm``, on the CPU: it asks for what FlashInfer asks for."""

    AllReduceFusionPattern = SimpleNamespace(kARResidualRMSNorm=1, kARResidualRMSNormDynamicFP8Quant=10)
    closed = 0

    def create_allreduce_fusion_workspace(self, **given: Any) -> Any:
        assert given["backend"] == "trtllm"  # the others use NVLink's multicast
        assert (given["world_size"], given["max_token_num"], given["hidden_dim"]) == (2, 9, 40)
        return SimpleNamespace(group=given["group"], destroy=self.close)

    def close(self) -> None:
        FlashInfer.closed += 1

    def allreduce_fusion(self, *, input: torch.Tensor, workspace: Any, pattern: int, **given: Any) -> None:
        summed = input.float()
        dist.all_reduce(summed, group=workspace.group)
        given["residual_out"].copy_(summed + given["residual_in"])
        c, gamma = given["residual_out"].float(), given["rms_gamma"].float()
        normed = torch.nn.functional.rms_norm(c, gamma.shape, gamma, given["rms_eps"])
        if pattern == 1:
            given["norm_out"].copy_(normed)
        else:
            scales = normed.abs().amax(1, keepdim=True) / torch.finfo(given["quant_out"].dtype).max
            given["scale_out"].copy_(scales)
            given["quant_out"].copy_(normed / scales)


def measured_with_flashinfer(rank: int, world_size: int, normed_dtype: str) -> tuple[list[Outcome], int]:
    with (
        mock.patch.object(Project, "missing_reason", lambda self, capability: None if self is FLASHINFER else "no GPU"),
        mock.patch.dict(sys.modules, {"flashinfer.comm": FlashInfer()}),
    ):
        outcomes = measured(rank, world_size, normed_dtype, False)
    return outcomes, FlashInfer.closed


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("normed_dtype", ["", "float8_e4m3fn"])
def test_flashinfer_is_given_what_it_asks_for(ranks: Any, normed_dtype: str) -> None:
    for outcomes, closed in ranks(2).call(measured_with_flashinfer, normed_dtype):
        (found,) = [one for one in outcomes if one.way == "flashinfer"]
        assert (found.status, found.reason) == ("ok", "")
        assert closed


def test_the_command_writes_rows_and_a_table(tmp_path: Path) -> None:
    out = tmp_path / "norm.csv"
    arguments = ["norm", "--world-size", "2", "--device", "cpu", "--shapes", "9x40x24", "--out", str(out)]
    with mock.patch.dict("os.environ", COLUMNS="200"):
        done = CliRunner().invoke(cli.app, [*arguments, "--family", "gemm_reduce_scatter"])
    assert done.exit_code == 0, done.output
    assert "unfused" in done.output
    assert [one.way for one in read_as(out, NormRecord)] == ["library", "unfused", "fused"]


def test_resuming_measures_the_problems_that_are_missing(tmp_path: Path) -> None:
    out = tmp_path / "norm.csv"
    arguments = ["norm", "--world-size", "2", "--device", "cpu", "--family", "gemm_all_reduce", "--out", str(out)]
    arguments += ["--resume", "--shapes"]
    assert CliRunner().invoke(cli.app, [*arguments, "9x40x24"]).exit_code == 0
    before = out.read_text()
    done = CliRunner().invoke(cli.app, [*arguments, "9x40x24,5x40x24"])
    assert done.exit_code == 0, done.output
    assert out.read_text().startswith(before)
    assert [(one.m, one.way) for one in read_as(out, NormRecord)] == [
        (m, way) for m in (9, 5) for way in ("library", "unfused", "fused", "kraken", "flashinfer")
    ]


def test_speedups_are_those_of_the_best_variant() -> None:
    rows = [("library", "", 30.0), ("unfused", "a", 15.0), ("unfused", "b", 12.0), ("fused", "a", 10.0)]
    outcome = Outcome("gemm_all_reduce", 1, 2, 3, "", "", "graph", "", None, None, None, "ok", 1, "", "")
    shared = {column.name: "" for column in fields(MeasuredOn)}
    records = [
        NormRecord(**(asdict(outcome) | {"way": way, "variant": variant, "time_us": us} | shared))
        for way, variant, us in rows
    ]
    (row,) = command.speedups(records).to_dict("records")
    assert (row["library"], row["unfused"], row["fused"]) == (30.0, 12.0, 10.0)
    assert (row["over_library"], row["over_unfused"]) == (3.0, 1.2)


def test_what_makes_no_sense_is_refused() -> None:
    for arguments, said in (
        (["--family", "all_gather_gemm"], "--family all_gather_gemm: there are gemm_all_reduce, gemm_reduce_scatter"),
        (["--normed-dtype", "int8"], "--normed-dtype int8: there are float8_e4m3fn, float8_e4m3fnuz"),
        (["--rounds", "0"], "--rounds 0 makes no sense"),
        (["--variant", "ring"], "ring"),
    ):
        done = CliRunner().invoke(cli.app, ["norm", "--device", "cpu", *arguments])
        assert done.exit_code == 2, done.output
        assert said in done.output
