"""The command memcheck: it passes only if compute-sanitizer looked and found nothing; a row per variant says so."""

from __future__ import annotations

import csv
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from families import FUSED
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.correctness.memcheck import cli as memcheck
from iris_bench.correctness.memcheck.record import MemcheckRecord
from iris_bench.correctness.stress.record import StressRecord
from iris_bench.records.csv_rows import append_records
from iris_bench.records.record import kind_of, read_as

# It writes the row that the command under it would have written.
SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
echo "timeout $IRIS_TIMEOUT_S: $@"
for out; do :; done
{stress}
{report}
exit {status}
"""
CLEAN = "echo '========= ERROR SUMMARY: 0 errors'"
INVALID = "echo '========= Invalid __global__ write of size 2 bytes'"
FAMILY, VARIANT = "all_gather_gemm", "copy_engine:portable"
DEVICE = {"device_name": "NVIDIA H100", "driver": "580.1", "torch": "2", "triton": "3", "commit": "c", "command": ""}


@pytest.fixture
def sanitizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``sanitizer(report, status, stress)`` makes one that prints and returns this, over such a row's run or none."""
    monkeypatch.delenv("IRIS_TIMEOUT_S", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("IRIS_COMMIT", "abc1234")

    def make(report: str = CLEAN, status: int = 0, stress: str | None = "ok") -> None:
        row = tmp_path / "stress-row.csv"
        row.unlink(missing_ok=True)
        if stress:
            counts = {"families": 1, "variants": 1, "operators": 4, "calls": 8, "elements": 9, "mismatches": 3}
            words = {"device": "cuda", "dtypes": "bf16", "error": "no memory", "timestamp": "", "status": stress}
            one = StressRecord(world_size=2, seconds=1.0, warm_up_seconds=1.0, seed=7, **counts, **words, **DEVICE)
            append_records(row, [one])
        script = tmp_path / "compute-sanitizer"
        copy = f'cp {row} "$out"' if stress else ""
        script.write_text(SANITIZER.format(report=report, status=status, stress=copy))
        script.chmod(0o755)

    return make


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["memcheck", "--family", FAMILY, "--variant", VARIANT, *map(str, arguments)])


@pytest.mark.parametrize(
    ("report", "status", "stress", "expected"),
    [
        (CLEAN, 0, "ok", ("ok", 0, "")),
        (INVALID, 0, "ok", ("wrong", 1, "reports 1 errors")),
        ("echo '========= ERROR SUMMARY: 3 errors'; " + CLEAN, 0, "ok", ("wrong", 3, "reports 3 errors")),
        (CLEAN, 1, "wrong", ("wrong", 0, "3 elements of outputs are wrong; seed 7")),
        (CLEAN, 1, "error", ("error", 0, "no memory")),
        (CLEAN, 1, None, ("error", 0, "exit status 1")),
        (CLEAN, 1, "ok", ("error", 0, "exit status 1")),
        ("", 0, "ok", ("error", None, "looked at nothing")),
    ],
)
def test_a_row_says_what_was_found(
    sanitizer: Any, tmp_path: Path, report: str, status: int, stress: str | None, expected: tuple[str, int | None, str]
) -> None:
    sanitizer(report, status, stress)
    out = tmp_path / "memcheck.csv"
    result = invoke("--world-size", 2, "--out", out)
    (row,) = read_as(out, MemcheckRecord)
    assert (row.family, row.variant, row.world_size, row.device) == (FAMILY, VARIANT, 2, "cuda")
    assert (row.status, row.errors) == expected[:2]
    assert expected[2] in row.reason
    assert bool(row.reason) == (row.status != "ok")
    assert result.exit_code == (row.status != "ok"), result.output
    assert (row.device_name, row.driver, row.seed) == (("NVIDIA H100", "580.1", 7) if stress else ("", "", None))
    assert row.commit == "abc1234"
    assert row.seconds is not None
    assert kind_of(out) is MemcheckRecord
    assert f"timeout {memcheck._TIMEOUT_S}: --tool memcheck --target-processes all" in result.stdout
    assert "stress --once --device cuda --world-size 2" in result.stdout


def test_every_variant_has_a_row_and_those_that_are_right_are_not_checked_again(sanitizer: Any, tmp_path: Path) -> None:
    sanitizer(report=f'case "$*" in *" {VARIANT} "*) {INVALID};; *) {CLEAN};; esac')
    out = tmp_path / "memcheck.csv"
    common = ["memcheck", "--family", FAMILY, "--out", str(out), "--resume"]
    assert CliRunner().invoke(cli.app, common).exit_code == 1
    rows = list(csv.DictReader(out.open()))
    assert [row["variant"] for row in rows] == [one.name for one in FUSED if one.family == FAMILY]
    assert [row["variant"] for row in rows if row["status"] != "ok"] == [VARIANT]
    sanitizer()
    again = CliRunner().invoke(cli.app, common)
    assert again.exit_code == 0, again.output
    new = list(csv.DictReader(out.open()))[len(rows) :]
    assert [(row["variant"], row["status"]) for row in new] == [(VARIANT, "ok")]


def test_an_interrupt_ends_the_sanitizer(
    sanitizer: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sanitizer(report="echo begun; exec sleep 600")
    started: list[subprocess.Popen[str]] = []

    class Started(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def read(found: Any, line: str) -> None:
        if line == "begun\n":
            raise KeyboardInterrupt

    monkeypatch.setattr(memcheck.subprocess, "Popen", Started)
    monkeypatch.setattr(memcheck._Found, "read", read)
    result = invoke()
    assert result.exit_code == 130
    assert "interrupted: 0 rows are lost" in result.stderr
    assert started[0].returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "--device cpu: compute-sanitizer looks at NVIDIA GPUs alone"),
        (["--variant", "library"], "only kernels are stressed"),
        (["--resume"], "--resume needs --out"),
        (["--out", "/dev/null/a.csv"], "no folder to write a.csv to"),
    ],
)
def test_the_command_refuses_in_one_line(sanitizer: Any, arguments: list[Any], said: str) -> None:
    sanitizer()
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_compute_sanitizer_memcheck_says_where_it_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcheck.shutil, "which", lambda *_, **__: None)
    result = invoke()
    assert result.exit_code == 2
    assert "compute-sanitizer" in result.stderr
    assert "CUDA toolkit" in result.stderr
