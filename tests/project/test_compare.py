"""Two commits' times in turns: what counts as slower, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import pandas as pd
import pytest
from records import make_records

from iris_bench.records.csv_rows import append_records

FAMILY, OURS = "gemm_all_scatter", "fused_sequential:portable"


def row(variant: str, m: int, time_us: float | None, host_us: float = 20.0) -> Any:
    return replace(make_records()[0], family=FAMILY, variant=variant, m=m, time_us=time_us, host_us=host_us)


def run(*times: float, gemm: float = 100.0, host: float = 20.0) -> list[Any]:
    """Return a run's rows: of each problem the GEMM alone, the library, and two variants of ours."""
    rows = []
    for number, time in enumerate(times):
        timed = {"gemm_alone": gemm, "library": 1.0, OURS: time, "bulk_synchronous:portable": 2 * time}
        rows += [row(variant, 512 << number, us, host) for variant, us in timed.items()]
    return rows


def lines_of(*runs: tuple[str, list[Any]]) -> list[str]:
    return compare.slower(compare.compared(runs))


def test_what_is_as_fast_is_not_slower_though_the_clock_drifts() -> None:
    runs = [("base", run(150)), ("now", run(165, gemm=110)), ("now", run(180, gemm=120)), ("base", run(150))]
    assert lines_of(*runs) == []


def test_a_mean_is_slower_where_no_problem_is() -> None:
    (line,) = lines_of(("base", run(150, 150)), ("now", run(151.5, 151.5)))
    assert line == f"{FAMILY}: geometric mean 1.0100"


def test_a_problem_is_slower_by_more_than_the_base_differs() -> None:
    faster, slower = run(100, 150), run(94, 159)
    (line,) = lines_of(("base", faster), ("now", slower))
    assert line.startswith(f"{FAMILY} 1024")
    assert "1.0600, spread 0.0000" in line
    assert lines_of(("base", faster), ("now", slower), ("base", run(100, 160))) == []


def test_the_hosts_time_counts() -> None:
    (line,) = lines_of(("base", run(150)), ("now", run(150, host=25)))
    assert "host time 1.250" in line


def test_without_times_nothing_is_compared() -> None:
    with pytest.raises(ValueError, match="no times of ours and of the GEMM alone"):
        compare.compared([("base", [row(OURS, 512, None)])])
    with pytest.raises(ValueError, match="kernels are compared on GPUs"):
        compare.compared([("base", [replace(one, device="cpu") for one in run(150)])])


def test_an_earlier_comparison_counts_by_its_files(tmp_path: Path) -> None:
    runs = [("base", run(100)), ("now", run(110)), ("now", run(110)), ("base", run(100))]
    for number, (turn, records) in enumerate(runs):
        append_records(tmp_path / f"{number}-{turn}.csv", records)
    (tmp_path / "compared.csv").write_text("family\n")
    pd.testing.assert_frame_equal(compare.compared(compare.runs_in(tmp_path)), compare.compared(runs))
    (tmp_path / "3-base.csv").unlink()
    with pytest.raises(ValueError, match="no whole round"):
        compare.runs_in(tmp_path)
    with pytest.raises(ValueError, match="runs of nothing"):
        compare.runs_in(tmp_path / "missing")
