"""What is made of rows: tables and plots."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from rich.console import Console
from test_bench_record import make_records

from iris_bench import plot, report
from iris_bench.baseline import over
from iris_bench.record import Record


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


def test_a_row_of_a_run_without_a_library_is_said_to_be() -> None:
    done = make_records()
    text = io.StringIO()
    alone = replace(done[1], variant="one_shot", library_us=None, speedup_vs_library=None)
    report.print_records(Console(file=text, width=report.WIDTH), [*done, alone])
    said = " ".join(text.getvalue().split())
    assert "one_shot: measured in another run than the row of library, where it has no time" in said


def test_speedups_over_another_row_are_of_the_same_run() -> None:
    done = make_records()
    later = replace(done[1], variant="one_shot", library_us=812.3, speedup_vs_library=812.3 / 500)
    shown = {record.variant: record for record in over([*done, later], "copy_engine")}
    assert shown["library"].speedup_vs_library == pytest.approx(500 / 700, rel=1e-5)
    assert shown["copy_engine"].speedup_vs_library == 1.0
    assert shown["gemm_alone"].speedup_vs_library == pytest.approx(500 / 340, rel=1e-5)
    assert shown["fused_sequential"].speedup_vs_library is None
    assert shown["one_shot"].speedup_vs_library is None
    assert over(done, "library") == done
    text = io.StringIO()
    report.print_records(Console(file=text, width=report.WIDTH), list(shown.values()), "copy_engine")
    assert "speedups are over copy_engine" in text.getvalue()
    assert "one_shot: measured in another run than the row of copy_engine, where it has no time" in text.getvalue()
    assert text.getvalue().count("another run") == 1


@pytest.mark.parametrize(
    ("device", "baseline", "said"),
    [
        ("cuda", "nobody", "rows that have: library, copy_engine, gemm_alone, communication_alone"),
        ("cuda", "fused_sequential", "no row of 'fused_sequential' has a time"),
        ("cpu", "copy_engine", "interpreted times are not performance"),
    ],
)
def test_a_row_without_a_time_is_no_baseline(device: str, baseline: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        over(make_records(device), baseline)


def test_a_picture_says_what_speedups_are_over(drawn: Callable[..., Figure]) -> None:
    figure = drawn(over(make_records(), "gemm_alone"), "gemm_alone")
    assert figure.axes[0].get_ylabel() == "speedup over gemm_alone"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tables_fit_in_a_hundred_columns(device: str) -> None:
    text = io.StringIO()
    report.print_records(Console(file=text, width=report.WIDTH), make_records(device))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert any("fused_sequential" in line and "wrong" in line for line in lines)
    assert ("interpreted: times are not performance" in text.getvalue()) == (device == "cpu")
    assert ("1.40" in text.getvalue()) == (device == "cuda")


def test_the_list_of_variants_is_folded_and_not_cut() -> None:
    text = io.StringIO()
    report.print_families(Console(file=text, width=report.WIDTH))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= report.WIDTH
    assert "…" not in text.getvalue()
    summaries = "".join(line[-20:].strip() for line in lines)  # the last column
    assert "all_gather_into_tensor" in summaries


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plot_is_drawn(tmp_path: Path, device: str) -> None:
    path = tmp_path / "new" / "plot.svg"
    plot.plot_records(make_records(device, "smoke,paper"), path)
    assert "<svg" in path.read_text()
    with pytest.raises(ValueError, match="no records"):
        plot.plot_records([], path)


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figure]:
    """The picture of records, before it is closed."""

    def draw(records: list[Record], over: str = "library") -> Figure:
        figures: list[Figure] = []
        monkeypatch.setattr(pyplot, "close", figures.append)
        plot.plot_records(records, tmp_path / "plot.svg", over)
        return figures[0]

    return draw


def test_every_variant_has_a_look_of_its_own_in_all_panels(drawn: Callable[..., Figure]) -> None:
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


def test_what_was_timed_without_a_baseline_shows_its_time(drawn: Callable[..., Figure]) -> None:
    library, row, wrong, *_ = make_records()
    library = replace(library, status="wrong", time_us=None, speedup_vs_library=None)
    alone = replace(row, library_us=None, speedup_vs_library=None)
    checked = replace(alone, variant="one_shot", time_us=None)
    (axes,) = drawn([library, alone, checked, wrong]).axes
    assert [text.get_text().strip() for text in axes.texts] == ["wrong", "500 µs, no baseline", "not timed", "wrong"]
