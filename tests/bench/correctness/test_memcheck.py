"""The command memcheck: it passes only if compute-sanitizer looked and found nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.correctness.stress import memcheck

SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
echo "timeout $IRIS_TIMEOUT_S: $@"
{report}
exit {status}
"""


@pytest.mark.parametrize(
    ("report", "status", "exit_code"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", 0, 0),
        ("echo '========= Invalid __global__ write of size 2 bytes'", 0, 1),
        ("echo '========= ERROR SUMMARY: 3 errors'", 0, 1),
        ("echo '========= ERROR SUMMARY: 0 errors'", 1, 1),
        ("", 0, 1),  # it did not look at anything
    ],
)
def test_memcheck_fails_on_any_report(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    report: str,
    status: int,
    exit_code: int,
) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(SANITIZER.format(report=report, status=status))
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("IRIS_TIMEOUT_S", raising=False)
    result = CliRunner().invoke(cli.app, ["memcheck", "--world-size", "2"])
    assert result.exit_code == exit_code
    assert f"timeout {memcheck._TIMEOUT_S}: --tool memcheck --target-processes all" in result.stdout
    assert "stress --once --device cuda --world-size 2" in result.stdout


def test_without_compute_sanitizer_memcheck_says_where_it_is_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memcheck.shutil, "which", lambda *_, **__: None)
    result = CliRunner().invoke(cli.app, ["memcheck"])
    assert result.exit_code == 2
    assert "compute-sanitizer" in result.stderr
    assert "CUDA toolkit" in result.stderr
