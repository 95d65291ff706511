"""The command that calibrates: what it shows, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

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
    to_text,
)


def test_the_command_runs_on_a_cpu_and_keeps_nothing(cache: Path) -> None:
    result = CliRunner().invoke(cli.app, ["calibrate", "--device", "cpu", "--world-size", "2"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "interpreted kernels: their times say nothing of a machine, and nothing is kept\n"
    assert not list(cache.glob("*"))


class FakeRanks:
    is_first = True

    def __init__(self, calibration: Calibration, busy: str) -> None:
        self.found = calibration, FACTS, busy

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self.found if fn is calibrate_cli._measure else None

    def close(self, *, kill: bool = False) -> None:
        pass


@pytest.mark.parametrize(("constants", "busy"), [(CONSTANTS, ""), (CONSTANTS, "the GPU is busy: so"), ({}, "")])
def test_the_command_shows_and_keeps_what_was_measured(
    constants: dict[str, float], busy: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ranks, "count_gpus", lambda: 2)
    ranks = FakeRanks(Calibration(ASSUMED, constants, ["hop_us: no such luck"], 12.0), busy)
    monkeypatch.setattr(calibrate_cli, "start_ranks", lambda *_: ranks)
    result = CliRunner().invoke(cli.app, ["calibrate", "--device", "cuda"])
    assert result.exit_code == (0 if constants else 1), result.output
    assert "2 x NVIDIA B999, 12 s" in result.stdout
    assert "as before: hop_us: no such luck" in result.stdout
    assert ("iris-bench: the GPU is busy: so; the constants may be too slow" in result.stderr) == bool(busy)
    taken = machine_in(to_text(FACTS, CONSTANTS)).link_gbps
    rows = [line.split() for line in result.stdout.splitlines()]
    before = ASSUMED.link_gbps
    assert ["link_gbps", f"{before:.4g}", "500", f"{taken:.4g}"] in rows or not constants
    machine = kept_machine(NEW, 2)
    assert (machine is not None) == bool(constants)
    assert machine is None or machine_in(read_calibration(NEW, 2) or "").link_gbps == machine.link_gbps == taken


def test_what_one_rank_sees_of_others_on_its_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = mock.Mock(is_interpreted=lambda: False)
    ctx.control_plane.all_gather = lambda own, what: [own, "the GPU is busy: so"]
    monkeypatch.setattr(calibrate_cli.measure, "context", lambda: ctx)
    monkeypatch.setattr(calibrate_cli, "busy_reason", lambda ctx: "")
    monkeypatch.setattr(calibrate_cli, "calibrate", lambda ctx, limit_s: "measured")
    monkeypatch.setattr(calibrate_cli, "facts_of", lambda ctx: FACTS)
    assert calibrate_cli._measure(0, 2, 60.0) == ("measured", FACTS, "the GPU is busy: so")
