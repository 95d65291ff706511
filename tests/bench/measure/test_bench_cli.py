"""The command: what it refuses, and what a sweep leaves behind."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from iris_bench import cli
from iris_bench.command import ranks
from iris_bench.measure import job as measure
from iris_bench.records.record import read_records
from iris_core.rendezvous import rank_info
from overlap_taxonomy import list_families, list_variants

LAUNCHER_VARIABLES = (*rank_info.TORCHRUN_VARIABLES, *ranks._MPI_VARIABLES, "IRIS_DEVICE", "TRITON_INTERPRET")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting ranks is a failure of the test."""

    def refuse(*_: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(ranks, "StartedRanks", refuse)
    monkeypatch.setattr(ranks, "count_gpus", lambda: 2)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("arguments", "given", "works"),
    [
        (["--family", "gemm_all_scater"], "gemm_all_scater", "gemm_all_scatter"),
        (
            ["--family", "gemm_all_scatter", "--variant", "copy_engine:portable,copy"],
            "'copy'",
            "fused_sequential:portable",
        ),
        (["--shapes", "papr"], "papr", "paper"),
        (["--shapes", "8x8"], "8x8", "MxNxK"),
        (["--dtype", "fp4"], "fp4", "fp8"),
        (["--scales", "row"], "--scales", "--dtype fp8"),
        (["--dtype", "fp8", "--scales", "rows"], "rows", "tensor, row, block"),
        (["--device", "tpu"], "tpu", "cuda"),
        (["--device", "cuda", "--world-size", "3"], "world size 3", "--world-size 2"),
        (["--device", "cpu", "--world-size", "0"], "world size 0", "positive"),
        (["--rounds", "0"], "--rounds 0", "positive"),
        (["--every", "0"], "--every 0", "positive"),
        (["--plot", "picture.bmp"], "picture.bmp", ".png"),
        (["--resume"], "--resume", "--out"),
        (["--resume", "--overwrite", "--out", "x.csv"], "--resume", "--overwrite"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_in_one_line(arguments: list[str], given: str, works: str) -> None:
    result = invoke("run", *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert given in result.stderr
    assert works in result.stderr


@pytest.mark.usefixtures("no_ranks")
def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("something\n")
    for more in ([], ["--resume"]):  # nor is one of ours expected in it
        result = invoke("run", "--out", path, *more)
        assert result.exit_code == 2
        assert str(path) in result.stderr
    assert path.read_text() == "something\n"


@pytest.mark.usefixtures("no_ranks")
def test_a_world_size_that_contradicts_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    result = invoke("run", "--device", "cpu", "--world-size", "3")
    assert result.exit_code == 2
    assert "--world-size 3 contradicts torchrun, which started 2 ranks" in result.stderr
    monkeypatch.setenv("RANK", "1")  # one rank speaks for all
    assert invoke("run", "--device", "cpu", "--world-size", "3").stderr == ""


def test_device_and_world_size_follow_the_machine() -> None:
    assert ranks.choose_device("auto", {}, 8) == "cuda"
    assert ranks.choose_device("auto", {}, 0) == "cpu"
    assert ranks.choose_device("auto", {"TRITON_INTERPRET": "1"}, 8) == "cpu"
    assert ranks.choose_device("auto", {"IRIS_DEVICE": "cpu"}, 8) == "cpu"
    with pytest.raises(ValueError, match="no GPU"):
        ranks.choose_device("cuda", {}, 0)
    assert ranks.choose_world_size(None, device="cuda", gpus=8, launcher=None) == 8
    assert ranks.choose_world_size(None, device="cpu", gpus=0, launcher=None) == 4
    launcher = ranks.Launcher("torchrun", 0, 2)
    assert ranks.choose_world_size(None, device="cpu", gpus=0, launcher=launcher) == 2


def test_ranks_that_share_gpus_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = partial(ranks.choose_world_size, 4, device="cuda", gpus=2, launcher=None)
    with pytest.raises(ValueError, match="4 is larger than the 2 GPU"):
        chosen(timed=False)
    monkeypatch.setenv("IRIS_RANKS_PER_GPU", "2")
    assert chosen(timed=False) == 4
    with pytest.raises(ValueError, match="cannot be timed"):
        chosen()


def test_list_names_everything() -> None:
    text = invoke("list").stdout
    said = " ".join(text.split())
    assert all(one.name in text for one in list_variants())
    assert "main loop: sm90; schedule: data_parallel" in said
    assert "main loop: portable; schedule: stream_k" in said
    assert all(name in text for name in (*list_families(), "small_m", "8192x4096x12288"))


class ScriptedRanks(ranks.Ranks):
    """Ranks whose every problem comes out as the script says."""

    is_first = True
    script: list[measure.Outcome] | Exception

    def __init__(self, world_size: int, device: str, hosts: int = 1) -> None:
        pass

    def call(self, fn: Any, *args: Any) -> Any:
        if fn is measure.open_rank:
            return {"device_name": "a machine", "driver": ""}
        if fn is measure.measure and isinstance(self.script, Exception):
            raise self.script
        return self.script

    def close(self, *, kill: bool = False) -> None:
        pass


def fail(self: ScriptedRanks, fn: Any, *args: Any) -> Any:
    raise RuntimeError("no GPU answers")


@pytest.mark.parametrize(
    ("status", "exit_code"), [("ok", 0), ("unsupported", 0), ("wrong", 1), ("error", 1)], ids=lambda value: str(value)
)
def test_the_exit_status_says_whether_all_went_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, exit_code: int
) -> None:
    monkeypatch.setattr(ranks, "StartedRanks", ScriptedRanks)
    ScriptedRanks.script = [
        measure.Outcome("library"),
        measure.Outcome("copy_engine:portable", status=status, reason="so"),
    ]
    result = invoke(
        *("run", "--device", "cpu", "--family", "gemm_all_scatter", "--shapes", "1x1x1", "--out", tmp_path / "rows.csv")
    )
    assert result.exit_code == exit_code
    assert [record.status for record in read_records(tmp_path / "rows.csv")] == ["ok", status]


def test_a_sweep_that_loses_its_ranks_ends_and_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "StartedRanks", ScriptedRanks)
    ScriptedRanks.script = TimeoutError("rank 1: waited in vain")
    arguments = ("--device", "cpu", "--shapes", "1x1x1,2x2x2", "--variant", "copy_engine:portable")
    result = invoke("run", *arguments, "--out", tmp_path / "rows.csv")
    assert result.exit_code == 1
    assert "ended early: TimeoutError: rank 1: waited in vain" in result.stderr
    records = read_records(tmp_path / "rows.csv")
    assert {(record.m, record.status) for record in records} == {(1, "error")}
    assert all("waited in vain" in record.reason for record in records)


def test_resuming_adds_what_was_not_ok_and_counts_each_thing_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "StartedRanks", ScriptedRanks)
    arguments = (
        "run",
        "--device",
        "cpu",
        "--no-time",
        "--family",
        "gemm_all_scatter",
        "--variant",
        "copy_engine:portable",
    )
    arguments += ("--shapes", "1x1x1", "--out", tmp_path / "rows.csv")
    for status, more, counted in (("wrong", (), "1 ok, 1 wrong"), ("ok", ("--resume",), "2 ok")):
        ScriptedRanks.script = [measure.Outcome("library"), measure.Outcome("copy_engine:portable", status=status)]
        assert f"{counted}; written" in invoke(*arguments, *more).stderr
    rows = [(record.variant, record.status) for record in read_records(tmp_path / "rows.csv")]
    assert rows == [("library", "ok"), ("copy_engine:portable", "wrong"), ("copy_engine:portable", "ok")]


def test_a_file_is_replaced_when_the_first_rows_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("of an earlier sweep\n")
    monkeypatch.setattr(ranks, "StartedRanks", ScriptedRanks)
    arguments = (
        "run",
        "--device",
        "cpu",
        "--no-time",
        "--family",
        "gemm_all_scatter",
        "--variant",
        "copy_engine:portable",
    )
    arguments += ("--shapes", "1x1x1,2x2x2", "--out", path, "--overwrite")
    with monkeypatch.context() as patch:
        patch.setattr(ScriptedRanks, "call", fail)
        result = invoke(*arguments)
    assert "written" not in result.stderr
    assert "the sweep ended early: RuntimeError: no GPU answers" in result.stderr
    assert path.read_text() == "of an earlier sweep\n"
    ScriptedRanks.script = [measure.Outcome("library"), measure.Outcome("copy_engine:portable")]
    assert f"written: {path}" in invoke(*arguments).stderr
    assert [record.m for record in read_records(path)] == [1, 1, 2, 2]


def test_rows_of_another_device_are_not_gone_on_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "StartedRanks", ScriptedRanks)
    csv = tmp_path / "rows.csv"
    arguments = (
        "run",
        "--device",
        "cpu",
        "--no-time",
        "--family",
        "gemm_all_scatter",
        "--variant",
        "copy_engine:portable",
    )
    arguments += ("--shapes", "1x1x1", "--out", csv)
    ScriptedRanks.script = [measure.Outcome("library"), measure.Outcome("copy_engine:portable", status="wrong")]
    assert invoke(*arguments).exit_code == 1
    (name,) = {record.device_name for record in read_records(csv)}
    rows = csv.read_text()
    csv.write_text(rows.replace(name, "Another GPU"))
    result = invoke(*arguments, "--resume")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert f"this is {name}, and the file to go on with has rows of Another GPU" in said
    assert "give another --out" in said
    assert csv.read_text() == rows.replace(name, "Another GPU")


def test_going_on_in_another_way_is_refused_or_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "StartedRanks", ScriptedRanks)
    arguments = ("run", "--device", "cpu", "--family", "gemm_all_scatter", "--variant", "copy_engine:portable")
    arguments += ("--shapes", "1x1x1", "--out", tmp_path / "rows.csv")
    library = measure.Outcome("library", time_us=3.0)
    ScriptedRanks.script = [library, measure.Outcome("copy_engine:portable", status="wrong")]
    assert "was not made" not in invoke(*arguments).stderr
    rows = (tmp_path / "rows.csv").read_text()
    result = invoke(*arguments, "--resume", "--burst", 3)
    assert result.exit_code == 2
    assert "times of bursts of 1" in result.stderr
    assert (tmp_path / "rows.csv").read_text() == rows
    ScriptedRanks.script = [library, measure.Outcome("copy_engine:portable", time_us=2.0)]
    result = invoke(*arguments, "--resume", "--seed", 5)
    assert result.exit_code == 0
    assert f"{tmp_path / 'rows.csv'} was not made as the rows to come are: it has seed 0 (now 5)\n" in result.stderr


def test_a_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv, picture = tmp_path / "rows.csv", tmp_path / "plot.png"
    arguments = ["run", "--device", "cpu", "--family", "gemm_all_scatter", "--variant", "fused_sequential:portable"]
    arguments += ["--world-size", 2, "--shapes", "5x3x2", "--out", csv]
    result = invoke(*arguments, "--plot", picture)
    assert result.exit_code == 0, result.output
    records = read_records(csv)
    names = ["library", "fused_sequential:portable", "gemm_alone", "communication_alone"]
    assert [record.variant for record in records] == names
    assert all(record.time_us and record.time_us > 0 for record in records)
    assert [record.correct for record in records] == [True, True, None, None]
    assert picture.stat().st_size > 0
    assert "interpreted: times are not performance" in result.stdout
    assert invoke("table", csv).stdout == result.stdout

    monkeypatch.setattr(ranks, "StartedRanks", None)  # everything is there: no rank is needed
    assert invoke(*arguments, "--resume").exit_code == 0
    assert read_records(csv) == records


def test_measuring_needs_no_greenlet() -> None:
    """It is for interpreting kernels; a machine with GPUs may lack it."""
    code = "import sys; sys.modules['greenlet'] = None; import iris_bench.cli, iris_core"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_what_is_applied_to_c_is_checked_and_a_column(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    common = ("--device", "cpu", "--world-size", 2, "--shapes", "33x24x20", "--variant", "fused_sequential:portable")
    for ops in ("", "scale,bias,residual,gelu"):
        arguments = ("run", *common, "--family", "gemm_all_scatter", "--no-time", "--out", out, "--resume")
        result = invoke(*arguments, *(["--epilogue", ops] if ops else []))
        assert result.exit_code == 0, result.output
    rows = [(record.epilogue, record.variant, record.status) for record in read_records(out)]
    variants = ("library", "fused_sequential:portable")
    assert rows == [(ops, variant, "ok") for ops in ("", "scale,bias,residual,gelu") for variant in variants]
    result = invoke("run", *common, "--epilogue", "bias,tanh")
    assert result.exit_code == 2
    assert "there is no epilogue op 'tanh'" in result.output


def test_hosts_divide_the_ranks_that_are_started_here() -> None:
    with pytest.raises(ValueError, match=r"--hosts 3 makes no sense; it takes a number that divides the 4 ranks"):
        ranks.check_hosts(3, 4, None)
    with pytest.raises(ValueError, match=r"--hosts 2: torchrun started these ranks; IRIS_HOST_ID"):
        ranks.check_hosts(2, 4, ranks.Launcher("torchrun", 0, 4))
    ranks.check_hosts(2, 4, None)
    ranks.check_hosts(1, 4, ranks.Launcher("torchrun", 0, 4))


def test_variants_are_measured_over_hosts(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    result = invoke(
        *("run", "--hosts", "2", "--world-size", "2", "--device", "cpu", "--family", "gemm_reduce_scatter"),
        *("--variant", "auto,async_tp,copy_engine:portable", "--shapes", "9x10x11", "--out", file),
    )
    assert result.exit_code == 0, result.output
    found = {record.variant: record for record in read_records(file)}
    assert {name: one.status for name, one in found.items()} == {
        **dict.fromkeys(("library", "auto", "copy_engine:portable", "gemm_alone", "communication_alone"), "ok"),
        "async_tp": "unsupported",
    }
    assert {one.device_name for one in found.values()} == {"CPU (Triton interpreter), 2 hosts"}
    assert found["auto"].config.startswith("chunks=2 inside: ")
