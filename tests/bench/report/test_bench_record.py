"""The CSV: its columns, what they are made of, and what is read of a damaged one; how a sweep is planned and timed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import ENVIRONMENT, make_plan, make_records

from iris_bench.measure import sweep
from iris_bench.measure.job import Outcome
from iris_bench.records.csv_rows import append_records
from iris_bench.records.frames import latest_records, other_configurations, to_frame
from iris_bench.records.record import COLUMNS, read_records

RESULTS = [
    path
    for path in sorted((Path(__file__).parents[3] / "results").rglob("*.csv"))
    if path.read_text().startswith("family,variant,shape_set,")
]
PROMISED = {
    *("family", "variant", "m", "n", "k", "world_size", "dtype", "device", "device_name", "time_us", "latency_us"),
    *("tflops", "speedup_vs_library", "overlap_efficiency", "error", "correct", "status", "reason", "config", "torch"),
    *("triton", "driver", "commit", "timestamp", "shape_set", "ideal_us", "link_gbps", "rounds", "burst", "seed"),
    "command",
}


def test_the_promised_columns_are_there() -> None:
    assert set(COLUMNS) >= PROMISED


def test_old_names_of_shape_sets_are_mapped_when_read(tmp_path: Path) -> None:
    path, records = tmp_path / "rows.csv", [replace(one, shape_set="decode") for one in make_records()]
    append_records(path, records)
    assert {record.shape_set for record in read_records(path)} == {"small_m"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, records = tmp_path / "rows.csv", make_records()
    append_records(path, records[:2])
    append_records(path, records[2:])
    text = path.read_text()
    assert text.splitlines()[0] == ",".join(COLUMNS)
    assert text.count("family,variant") == 1
    read = read_records(path)
    assert [record.key for record in read] == [record.key for record in records]
    assert read[2].reason == records[2].reason
    assert read[2].correct is False
    assert read[2].time_us is None
    assert read[1].speedup_vs_library == pytest.approx(1.4)


@pytest.mark.parametrize("path", ["2026-11-22-h200x4/links.csv", "2026-11-26-h200x4/stress.csv"])
def test_a_csv_of_another_command_is_named(path: str) -> None:
    command = Path(path).stem
    with pytest.raises(ValueError, match=f"is a CSV of iris-bench {command}; this takes those of iris-bench run"):
        read_records(Path(__file__).parents[3] / "results" / path)


def test_rows_of_other_configurations_are_counted() -> None:
    """Not those of the same one, measured again, nor those that were not timed."""
    done = make_records()
    assert other_configurations(to_frame([*done, *done])) == 0
    again = [replace(record, config="64x64x64") for record in done]
    assert other_configurations(to_frame([*done, *again])) == sum(record.time_us is not None for record in done)


def test_derived_figures() -> None:
    library, copy_engine, wrong, gemm, communication = make_records()
    problem = make_plan().jobs[0].problem()
    assert library.speedup_vs_library == 1.0
    assert copy_engine.speedup_vs_library == pytest.approx(700 / 500)
    assert copy_engine.ideal_us == problem.ideal_us(gemm_us=340.0, link_gbps=387.0)
    assert copy_engine.overlap_efficiency == pytest.approx(copy_engine.ideal_us / 500)
    assert copy_engine.tflops == pytest.approx(2 * 8192**3 / 4 / 500e-6 / 1e12)
    assert (wrong.time_us, wrong.tflops, wrong.speedup_vs_library) == (None, None, None)
    assert gemm.tflops is not None
    assert (gemm.speedup_vs_library, communication.tflops) == (None, None)


def test_without_a_measured_link_there_is_no_ideal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of another machine's link; the row says what was missing."""
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    plan = make_plan(link_gbps=None)
    outcomes = [Outcome("library", time_us=700.0), Outcome("gemm_alone", time_us=340.0)]
    link = sweep._link(plan, "Some GPU")
    row, _ = sweep.to_records(plan, plan.jobs[0], outcomes, ENVIRONMENT, link)
    assert (row.ideal_us, row.overlap_efficiency, row.link_gbps) == (None, None, None)
    assert row.link_source == "not measured on 4 x Some GPU: iris-bench links --world-size 4"
    alone = make_plan(link_gbps=None, world_size=1)
    row, _ = sweep.to_records(alone, alone.jobs[0], outcomes, ENVIRONMENT, sweep._link(alone, "Some GPU"))
    assert row.ideal_us == 340.0


def test_an_older_file_gets_the_columns_of_new_rows(tmp_path: Path) -> None:
    path, (first, second, *_) = tmp_path / "rows.csv", make_records()
    append_records(path, [replace(first, link_source="")])
    lines = [line.split(",") for line in path.read_text().splitlines()]
    place = lines[0].index("link_source")
    path.write_text("".join(",".join([*cells[:place], *cells[place + 1 :]]) + "\n" for cells in lines))
    assert read_records(path) == [replace(first, link_source="")]
    append_records(path, [second])
    assert read_records(path) == [replace(first, link_source=""), second]


def test_interpreted_times_are_no_performance() -> None:
    for record in make_records("cpu"):
        derived = (record.tflops, record.speedup_vs_library, record.overlap_efficiency, record.ideal_us)
        assert derived == (None, None, None, None)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv is not a CSV of this version"):
        read_records(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_records(tmp_path / "absent.csv")
    path.write_text("")
    with pytest.raises(ValueError, match="no line that is whole"):
        read_records(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (COLUMNS[1:], "(missing: family)"),
        ((*COLUMNS, "colour"), "(unknown: colour)"),
        ((*COLUMNS, "m"), "(repeated: m)"),
        ((COLUMNS[1], COLUMNS[0], *COLUMNS[2:]), "(out of order: variant, family)"),
        (("variant", "family", "colour", *COLUMNS[3:]), "(missing: shape_set; unknown: colour; out of order: variant"),
    ],
)
def test_columns_that_differ_are_named(tmp_path: Path, header: tuple[str, ...], said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(header) + "\n")
    with pytest.raises(ValueError, match=re.escape(said)):
        read_records(path)


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    path, records = tmp_path / "rows.csv", make_records()
    append_records(path, [records[0], replace(records[1], dtype="int4")])
    with pytest.raises(ValueError, match=r"rows\.csv, line 3: unknown dtype 'int4'; it is one of bf16, fp16, fp32"):
        read_records(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"time_us": -3.0}, "time_us is -3; it is positive and finite, or empty"),
        ({"time_us": math.nan}, "time_us is nan"),
        ({"latency_us": math.inf}, "latency_us is inf"),
        ({"latency_us": 0.0}, "latency_us is 0"),
        ({"library_us": -math.inf}, "library_us is -inf"),
        ({"link_gbps": 0.0}, "link_gbps is 0"),
        ({"link_gbps": None}, "ideal_us without the link_gbps"),
        ({"m": 0}, "m is 0; it is at least 1"),
        ({"k": -8192}, "k is -8192"),
        ({"world_size": 0}, "world_size is 0"),
        ({"burst": 0}, "burst is 0"),
        ({"status": "okay"}, "unknown status 'okay'; it is one of ok, wrong, unsupported, error"),
        ({"error": -0.1}, "error is -0.1"),
        ({"error": math.nan}, "error is nan"),
        ({"error": math.inf}, "error is inf and status ok"),
    ],
    ids=str,
)
def test_a_number_that_no_measurement_came_to_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path, records = tmp_path / "rows.csv", make_records()
    append_records(path, [records[0], replace(records[1], **changes)])
    with pytest.raises(ValueError, match=rf"rows\.csv, line 3: {re.escape(said)}"):
        read_records(path)


def test_what_a_wrong_variant_leaves_is_read(tmp_path: Path) -> None:
    wrong = replace(make_records()[2], error=math.inf)
    append_records(tmp_path / "rows.csv", [wrong])
    assert read_records(tmp_path / "rows.csv") == [wrong]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_committed_sweeps_are_read(path: Path) -> None:
    assert read_records(path)


@pytest.mark.parametrize(("broken", "message"), [("x", "1 fields"), (",".join(["x"] * len(COLUMNS)), "line 2")])
def test_a_broken_line_is_named(tmp_path: Path, broken: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{','.join(COLUMNS)}\n{broken}\n")
    with pytest.raises(ValueError, match=message):
        read_records(path)


@pytest.mark.parametrize("link_gbps", [0.0, -1.0, math.nan, math.inf])
def test_a_link_that_is_no_number_is_refused(link_gbps: float) -> None:
    with pytest.raises(ValueError, match=r"--link-gbps .* makes no sense"):
        make_plan(link_gbps=link_gbps)


def test_the_last_row_of_a_thing_counts() -> None:
    first = make_records()
    again = replace(first[2], status="ok")
    assert latest_records([*first, again]) == [*first[:2], again, *first[3:]]


def test_rows_of_two_kinds_of_gpu_are_of_two_problems() -> None:
    rows = make_records()
    others = [replace(row, device_name="Another GPU") for row in rows]
    assert latest_records([*rows, *others, *rows]) == [*rows, *others]


def test_the_library_is_always_measured() -> None:
    assert make_plan(variants="copy_engine:portable").jobs[0].variants == ("library", "copy_engine:portable")


def test_the_heap_holds_every_fused_variant_of_the_largest_problem() -> None:
    plan = make_plan(
        variants="library,copy_engine:portable,fused_sequential:portable", shapes="64x64x64,8192x8192x8192"
    )
    assert plan.heap_bytes >= 2 * 8192 * 8192 * 2
    assert plan.heap_bytes < 2 * 8192 * 8192 * 2 + (16 << 20)
