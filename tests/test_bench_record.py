"""The CSV, and what is made of it: columns, summary statistics, tables, plots."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from rich.console import Console

from iris_bench import plot, report, sweep, timing
from iris_bench.csv_rows import append_records
from iris_bench.measure import Outcome
from iris_bench.record import COLUMNS, Record, latest, read_records

PROMISED = {
    *("family", "variant", "m", "n", "k", "world_size", "dtype", "device", "device_name", "time_us", "latency_us"),
    *("tflops", "speedup_vs_library", "overlap_efficiency", "error", "correct", "status", "reason", "config", "torch"),
    *("triton", "driver", "commit", "timestamp", "shape_set", "ideal_us", "link_gbps", "rounds", "burst", "seed"),
    "command",
}

ENVIRONMENT = {
    "device_name": "Some GPU",
    "driver": "1.2",
    "torch": "2",
    "triton": "3",
    "commit": "abc",
    "command": "iris-bench run",
}


def make_plan(*, device: str = "cuda", **changes) -> sweep.Plan:
    arguments = {
        "families": "gemm_all_scatter",
        "variants": "all",
        "shapes": "8192x8192x8192",
        "dtype": "bf16",
        "device": device,
        "world_size": 4,
        "seed": 0,
        "rounds": None,
        "burst": None,
        "timed": True,
        "link_gbps": 387.0,
    }
    return sweep.make_plan(**{**arguments, **changes})


def make_records(device: str = "cuda", shapes: str = "8192x8192x8192") -> list[Record]:
    records = []
    plan = make_plan(device=device, shapes=shapes)
    for job in plan.jobs:
        outcomes = [
            Outcome("library", correct=True, error=1e-3, time_us=700.0, latency_us=720.0, host_us=50.0),
            Outcome("copy_engine", correct=True, error=1e-3, time_us=500.0, latency_us=520.0, host_us=50.0),
            Outcome("fused_sequential", status="wrong", correct=False, error=1.0, reason='12, or "13"\nelements'),
            Outcome("gemm_alone", time_us=340.0, latency_us=350.0, host_us=10.0),
            Outcome("communication_alone", time_us=300.0, latency_us=310.0, host_us=10.0),
        ]
        records += sweep.to_records(plan, job, outcomes, ENVIRONMENT)
    return records


def test_the_promised_columns_are_there() -> None:
    assert set(COLUMNS) >= PROMISED


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
    with pytest.raises(ValueError, match=r"rows\.csv, line 3: unknown dtype 'int4'; known dtypes: bf16, fp16, fp32"):
        read_records(path)


@pytest.mark.parametrize(("broken", "message"), [("x", "1 fields"), (",".join(["x"] * len(COLUMNS)), "line 2")])
def test_a_broken_line_is_named(tmp_path: Path, broken: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{','.join(COLUMNS)}\n{broken}\n")
    with pytest.raises(ValueError, match=message):
        read_records(path)


def test_a_speedup_over_another_time_of_the_library_is_said_to_be() -> None:
    """As resuming leaves it: the row of `library` is of the first run."""
    done = make_records()
    later = replace(done[1], variant="one_shot", library_us=812.3, speedup_vs_library=812.3 / 500)
    text = io.StringIO()
    report.print_records(Console(file=text, width=report.WIDTH), [*done, later])
    said = " ".join(text.getvalue().split())
    assert "one_shot: measured in another run than the row of library, against library there: 812.3 us" in said
    assert "copy_engine: measured in another run" not in said
    assert "copy_engine, one_shot" not in said


@pytest.mark.parametrize("link_gbps", [0.0, -1.0, math.nan, math.inf])
def test_a_link_that_is_no_number_is_refused(link_gbps: float) -> None:
    with pytest.raises(ValueError, match=r"--link-gbps .* makes no sense"):
        make_plan(link_gbps=link_gbps)


def test_the_last_row_of_a_thing_counts() -> None:
    first = make_records()
    again = replace(first[2], status="ok")
    assert latest([*first, again]) == [*first[:2], again, *first[3:]]


def test_rows_of_two_kinds_of_gpu_are_of_two_problems() -> None:
    rows = make_records()
    others = [replace(row, device_name="Another GPU") for row in rows]
    assert latest([*rows, *others, *rows]) == [*rows, *others]
    assert len({row.problem_key for row in [*rows, *others]}) == 2


def test_the_library_is_always_measured() -> None:
    assert make_plan(variants="copy_engine").jobs[0].variants == ("library", "copy_engine")


def test_the_heap_holds_every_fused_variant_of_the_largest_problem() -> None:
    plan = make_plan(variants="library,copy_engine,fused_sequential", shapes="64x64x64,8192x8192x8192")
    assert plan.heap_bytes >= 2 * 8192 * 8192 * 2
    assert plan.heap_bytes < 2 * 8192 * 8192 * 2 + (16 << 20)


def test_the_slowest_rank_counts_by_its_median() -> None:
    assert timing.slowest_median([[1.0, 2.0, 90.0], [3.0, 3.0, 1.0]]) == 3.0


@pytest.mark.parametrize(("operand_bytes", "count"), [(1, 16), (0, 16), (10 << 20, 10), (50 << 20, 2), (500 << 20, 2)])
def test_operand_sets_pass_twice_through_the_cache(operand_bytes: int, count: int) -> None:
    assert timing.count_sets(operand_bytes=operand_bytes, cache_bytes=50 << 20) == count


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tables_fit_in_a_hundred_columns(device: str) -> None:
    text = io.StringIO()
    report.print_records(Console(file=text, width=report.WIDTH), make_records(device))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert any("fused_sequential" in line and "wrong" in line for line in lines)
    assert ("interpreted: times are not performance" in text.getvalue()) == (device == "cpu")
    assert ("1.40" in text.getvalue()) == (device == "cuda")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plot_is_drawn(tmp_path: Path, device: str) -> None:
    path = tmp_path / "new" / "plot.svg"
    plot.plot_records(make_records(device, "smoke,paper"), path)
    assert "<svg" in path.read_text()
    with pytest.raises(ValueError, match="no records"):
        plot.plot_records([], path)


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Record]], Figure]:
    """The picture of records, before it is closed."""

    def draw(records: list[Record]) -> Figure:
        figures: list[Figure] = []
        monkeypatch.setattr(pyplot, "close", figures.append)
        plot.plot_records(records, tmp_path / "plot.svg")
        return figures[0]

    return draw


def test_every_variant_has_a_look_of_its_own_in_all_panels(drawn: Callable[[list[Record]], Figure]) -> None:
    library, row, *_ = make_records()
    names = [f"variant_{index}" for index in range(20)]
    baselines = [replace(library, variant=name) for name in ("library", *(f"library_{index}" for index in range(5)))]
    several = [*baselines, *(replace(row, variant=name) for name in names)]
    later = [replace(one, m=8, n=8, world_size=2) for one in (library, several[-1])]
    figure = drawn([*several, *later])
    (legend,) = figure.legends
    looks = {
        text.get_text(): (patch.get_facecolor(), patch.get_hatch())
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=False)
    }
    assert len(set(looks.values())) == len(looks) == len(several)
    _, lower = figure.axes
    bars = [(bar.get_facecolor(), bar.get_hatch()) for bar in lower.patches]
    assert bars == [looks["library"], looks[names[-1]]]


def test_what_was_timed_without_a_baseline_shows_its_time(drawn: Callable[[list[Record]], Figure]) -> None:
    library, row, wrong, *_ = make_records()
    library = replace(library, status="wrong", time_us=None, speedup_vs_library=None)
    alone = replace(row, library_us=None, speedup_vs_library=None)
    checked = replace(alone, variant="one_shot", time_us=None)
    (axes,) = drawn([library, alone, checked, wrong]).axes
    assert [text.get_text().strip() for text in axes.texts] == ["wrong", "500 µs, no baseline", "not timed", "wrong"]


@pytest.mark.parametrize("size", range(1, 10))
def test_each_subject_comes_equally_often_after_each_other(size: int) -> None:
    rounds = 2 * size if size % 2 else size
    orders = [timing.balanced(range(size), number) for number in range(rounds)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(pairs) == size * (size - 1)
    assert len(set(pairs.values())) <= 1
    few = Counter(pair for order in orders[: size - 1] for pair in itertools.pairwise(order))
    assert all(count == 1 for count in few.values())
