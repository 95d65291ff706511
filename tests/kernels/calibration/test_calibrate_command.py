"""The command that calibrates: what it shows, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrations import ASSUMED, CONSTANTS, FACTS, NEW
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.command import ranks as bench_ranks
from iris_bench.tune import calibrate_cli
from iris_kernels.common.calibration.calibrate import Calibration
from iris_kernels.common.calibration.kept import (
    kept_machine,
    machine_in,
    read_calibration,
)


def test_the_command_runs_on_a_cpu_and_keeps_nothing(cache: Path) -> None:
    result = CliRunner().invoke(cli.app, ["calibrate", "--device", "cpu", "--world-size", "2"])
    assert result.exit_code == 0, result.output
    assert "as before: the main loop for Hopper: ValueError" in result.stdout
    assert "nothing is kept" in result.stdout
    assert not list(cache.glob("*"))


class FakeRanks:
    is_first = True

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return (self.calibration, FACTS) if fn is calibrate_cli._measure else None

    def close(self, *, kill: bool = False) -> None:
        pass


@pytest.mark.parametrize("constants", [CONSTANTS, {}])
def test_the_command_shows_and_keeps_what_was_measured(
    constants: dict[str, float], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ranks, "count_gpus", lambda: 2)
    ranks = FakeRanks(Calibration(ASSUMED, constants, ["hop_us: no such luck"], 12.0))
    monkeypatch.setattr(calibrate_cli, "start_ranks", lambda *_: ranks)
    result = CliRunner().invoke(cli.app, ["calibrate", "--device", "cuda"])
    assert result.exit_code == (0 if constants else 1), result.output
    assert "2 x NVIDIA B999, 12 s" in result.stdout
    assert "as before: hop_us: no such luck" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["link_gbps", f"{ASSUMED.link_gbps:.4g}", "500"] in rows or not constants
    machine = kept_machine(NEW, 2)
    assert (machine is not None) == bool(constants)
    assert machine is None or machine_in(read_calibration(NEW, 2) or "").link_gbps == 500.0
