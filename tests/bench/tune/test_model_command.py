"""`iris-bench model`: compares the cost model with CSVs, fits it and predicts; says what it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.records.csv_rows import append_records
from iris_bench.records.record import Record, read_records
from overlap_taxonomy import (
    list_families,
)

RESULTS = Path(__file__).parents[3] / "results"
SWEEPS = [RESULTS / f"{name}-bf16.csv" for name in ("tuning/h200x4", "2026-11-22-h200x4/large")]


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, ["model", *map(str, arguments)])


def test_the_command_compares_fits_and_predicts() -> None:
    compared = invoke(*SWEEPS)
    assert compared.exit_code == 0, compared.output
    assert "h200x4: median error of all" in compared.stdout
    assert "not modelled: async_tp" in compared.stdout
    assert "8192x8192x28672" in invoke(SWEEPS[1], "--each").stdout
    fitted = invoke("--fit", SWEEPS[1])
    assert "link_gbps=" in fitted.stdout
    predicted = invoke("--machine", "h200x8,mi300xx8", "--shapes", "1024x2048x4096")
    assert predicted.stdout.count("PREDICTION") == 2 * len(list_families())
    assert "PREDICTION" not in invoke("--shapes", "1024x2048x4096").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--machine", "abacus"], "known machines: h200x2"),
        (["--fit"], "--fit needs CSVs"),
        (["8192x28672x8192"], "sizes go to --shapes 8192x28672x8192"),
        (["nothing.csv"], "cannot read nothing.csv"),
        (["--machine", "mi300xx8", SWEEPS[0]], "no row of the CSVs was measured on 8 x MI300X"),
        (["--machine", "h200x2", SWEEPS[0]], "they are of 4 x NVIDIA H200: --machine h200x4"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[object], says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_rows_that_it_cannot_compare_are_named(tmp_path: Path) -> None:
    def refused(rows: Sequence[Record], *options: str) -> str:
        (tmp_path / "rows.csv").unlink(missing_ok=True)
        append_records(tmp_path / "rows.csv", rows)
        result = invoke(tmp_path / "rows.csv", *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1
        return result.stderr

    rows = read_records(SWEEPS[0])
    unknown = [row for row in rows if (row.family, row.variant) == ("all_gather_gemm", "async_tp")]
    for options in ([], ["--each"], ["--fit"]):
        said = refused(unknown, *options)
        assert "the model knows none of the variants measured on 4 x H200: all_gather_gemm/async_tp;" in said
    for options in ([], ["--fit"], ["--evaluate"]):
        assert "the CSVs have no time of a GPU" in refused([replace(rows[0], device="cpu")], *options)
    assert "rows.csv, line 3: unknown dtype 'int4'" in refused([rows[0], replace(rows[1], dtype="int4")])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keep", "hop_us"], "there is no --fit"),
        (["--each"], "--each sweep.csv"),
        (["--fit"], "--fit needs CSVs"),
        ([RESULTS / "tuning/h200x2-rows512-bf16.csv", "--shapes", "1x2x3"], "say what to predict"),
        ([RESULTS / "tuning/h200x2-rows512-bf16.csv", "--family", "all_gather_gemm"], "say what to predict"),
    ],
)
def test_options_without_effect_are_refused(options: list[str | Path], said: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2
    assert said in result.stderr
