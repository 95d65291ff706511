"""What is made of rows: tables and plots."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from records import make_records
from rich.console import Console

from iris_bench import cli
from iris_bench.records import frames, plot, report
from iris_bench.records.looks import LOOKS, looks_of
from iris_bench.records.record import Record
from overlap_taxonomy import list_variants, register, registry

ROOT = Path(__file__).parents[3]
LATER = "fused_sequential:portable:stream_k"


def test_a_speedup_over_another_time_of_the_library_is_said_to_be() -> None:
    """As resuming leaves it: the row of `library` is of the first run."""
    done = make_records()
    later = replace(done[1], variant=LATER, library_us=812.3, speedup_vs_library=812.3 / 500)
    text = io.StringIO()
    report.print_records(Console(file=text, width=report.WIDTH), [*done, later])
    said = " ".join(text.getvalue().split())
    assert f"{LATER}: measured in another run than the row of library, against library there: 812.3 us" in said
    assert "copy_engine:portable: measured in another run" not in said
    assert f"copy_engine:portable, {LATER}" not in said


def test_a_row_of_a_run_without_a_library_is_said_to_be() -> None:
    done = make_records()
    text = io.StringIO()
    alone = replace(done[1], variant=LATER, library_us=None, speedup_vs_library=None)
    report.print_records(Console(file=text, width=report.WIDTH), [*done, alone])
    said = " ".join(text.getvalue().split())
    assert f"{LATER}: measured in another run than the row of library, where it has no time" in said


def test_speedups_over_another_row_are_of_the_same_run() -> None:
    done = make_records()
    later = replace(done[1], variant=LATER, library_us=812.3, speedup_vs_library=812.3 / 500)
    rows = frames.over(frames.to_frame([*done, later]), "copy_engine:portable")
    shown = {row.variant: row for row in rows.itertuples()}
    assert shown["library"].speedup_vs_library == pytest.approx(500 / 700, rel=1e-5)
    assert shown["copy_engine:portable"].speedup_vs_library == 1.0
    assert shown["gemm_alone"].speedup_vs_library == pytest.approx(500 / 340, rel=1e-5)
    assert math.isnan(shown["fused_sequential:portable"].speedup_vs_library)
    assert math.isnan(shown[LATER].speedup_vs_library)
    assert frames.over(frames.to_frame(done), "library").equals(frames.to_frame(done))
    text = io.StringIO()
    report.print_frame(Console(file=text, width=report.WIDTH), rows, "copy_engine:portable")
    assert "speedups are over copy_engine:portable" in text.getvalue()
    said = " ".join(text.getvalue().split())
    assert f"{LATER}: measured in another run than the row of copy_engine:portable, where it has no time" in said
    assert text.getvalue().count("another run") == 1


@pytest.mark.parametrize(
    ("device", "baseline", "said"),
    [
        ("cuda", "nobody", "rows that have: library, copy_engine:portable, gemm_alone, communication_alone"),
        ("cuda", "fused_sequential:portable", "no row of 'fused_sequential:portable' has a time"),
        ("cpu", "copy_engine:portable", "interpreted times are not performance"),
    ],
)
def test_a_row_without_a_time_is_no_baseline(device: str, baseline: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        frames.over(frames.to_frame(make_records(device)), baseline)


def test_a_picture_says_what_speedups_are_over(drawn: Callable[..., Figure]) -> None:
    figure = drawn(make_records(), "gemm_alone")
    assert figure.axes[0].get_xlabel() == "speedup over gemm_alone"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tables_fit_in_a_hundred_columns(device: str) -> None:
    text = io.StringIO()
    report.print_records(Console(file=text, width=report.WIDTH), make_records(device))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert any("fused_sequential:portable" in line and ("wrong" in line or device == "cpu") for line in lines)
    assert ("interpreted: times are not performance" in text.getvalue()) == (device == "cpu")
    assert ("1.40" in text.getvalue()) == (device == "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_in_a_narrow_terminal_words_are_folded_and_numbers_whole(device: str) -> None:
    wide, narrow = io.StringIO(), io.StringIO()
    for text, width in ((wide, 200), (narrow, 80)):
        report.print_records(Console(file=text, width=width), [replace(make_records(device)[0], variant=LATER)])
    assert "…" not in narrow.getvalue()
    (whole,) = (line for line in wide.getvalue().splitlines() if LATER in line)
    assert [part for part in whole.split() if part not in narrow.getvalue()] in ([], [LATER])


def test_no_cell_is_cut_where_the_output_is_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The widest rows: the longest name, five digits of microseconds, an unsupported variant."""
    cli.table([ROOT / "results/2026-11-29-h200x2/llama-bf16.csv"])
    shown = capsys.readouterr().out
    for said in ("fused_sequential:portable:stream_k", "13,101.0", "unsupported"):
        assert said in shown
    assert "…" not in shown


def test_the_rows_of_one_family_are_found_in_several_files(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("2026-11-29-h200x2/fp8-row.csv", "2026-11-26-h200x4/fp8-row.csv")
    cli.table([ROOT / "results" / name for name in names], family="gemm_all_reduce,all_gather_gemm")
    heads = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("NVIDIA H200")]
    assert set(heads) == {"gemm_all_reduce", "all_gather_gemm"}
    cli.table([ROOT / "results" / name for name in names])
    assert len(set(re.findall(r"fp8, (\d) x", capsys.readouterr().out))) == 2


def test_the_list_of_variants_is_folded_and_not_cut() -> None:
    text = io.StringIO()
    report.print_families(Console(file=text, width=report.WIDTH))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= report.WIDTH
    assert "…" not in text.getvalue()
    said = " ".join(text.getvalue().split())
    for variant in list_variants():
        assert f"{variant.name} {variant.summary}" in said


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plot_is_drawn(tmp_path: Path, device: str) -> None:
    path = tmp_path / "new" / "plot.svg"
    plot.plot_records(make_records(device, "smoke,paper"), path)
    assert "<svg" in path.read_text()
    with pytest.raises(ValueError, match="no records"):
        plot.plot_records([], path)


def test_a_family_that_is_not_installed_is_drawn(drawn: Callable[..., Figure]) -> None:
    figure = drawn([replace(one, family="of_another_project", n=24, k=40) for one in make_records()])
    assert figure.axes[0].get_yticklabels()[0].get_text() == "8192 × 24 × 40"


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
    names = ["copy_engine:portable", "warp_specialized:sm90", "kraken", *(f"variant_{index}" for index in range(20))]
    baselines = [replace(library, variant=name) for name in ("library", "library_list")]
    several = [*baselines, *(replace(row, variant=name) for name in names)]
    later = [replace(one, m=8, n=8, world_size=2) for one in (library, several[-1])]
    figure = drawn([*several, *later])
    (legend,) = figure.legends
    looks = {line.get_label(): (line.get_color(), line.get_marker()) for line in legend.get_lines()}
    del looks["ideal"]
    assert len(set(looks.values())) == len(looks) == len(several)
    assert looks["kraken"] == LOOKS["kraken"]
    _, lower = figure.axes
    points = {line.get_label(): (line.get_color(), line.get_marker()) for line in lower.get_lines()}
    assert {name: points[name] for name in ("library", names[-1])} == {
        name: looks[name] for name in ("library", names[-1])
    }


def test_all_panels_have_one_scale(drawn: Callable[..., Figure]) -> None:
    library, row, *_ = make_records()
    faster = replace(row, world_size=2, time_us=100.0, speedup_vs_library=7.0)
    upper, lower = drawn([library, row, replace(library, world_size=2), faster]).axes
    assert upper.get_xlim() == lower.get_xlim()


def test_what_was_timed_without_a_baseline_shows_its_time(drawn: Callable[..., Figure]) -> None:
    library, row, wrong, *_ = make_records()
    library = replace(library, status="wrong", time_us=None, speedup_vs_library=None)
    alone = replace(row, library_us=None, speedup_vs_library=None)
    checked = replace(alone, variant=LATER, time_us=None)
    (axes,) = drawn([library, alone, checked, wrong]).axes
    (text,) = axes.texts
    assert text.get_text() == (
        "library: wrong; copy_engine:portable: 500 µs, no baseline; "
        f"{LATER}: not timed; fused_sequential:portable: wrong"
    )


def test_what_is_unsupported_is_named_under_the_others(drawn: Callable[..., Figure]) -> None:
    library, row, *_ = make_records()
    none = [replace(row, variant=name, status="unsupported", time_us=None) for name in (LATER, "kraken")]
    none = [replace(one, speedup_vs_library=None) for one in none]
    (axes,) = drawn([library, row, *none]).axes
    assert [text.get_text() for text in axes.texts] == [f"unsupported: {LATER}, kraken"]


def test_without_a_gpu_right_and_wrong_are_counted() -> None:
    text = io.StringIO()
    report.print_records(Console(file=text, width=report.WIDTH), make_records("cpu", "smoke"))
    lines = text.getvalue().splitlines()
    assert any(
        line.split()[1:3] == ["copy_engine:portable", "3"] or line.split()[:2] == ["copy_engine:portable", "3"]
        for line in lines
    )
    (counted,) = (line for line in lines if line.split()[:1] == ["fused_sequential:portable"] and "12, or" not in line)
    assert "3" in counted
    assert sum("fused_sequential:portable: 12, or" in line for line in lines) == 3
    assert "time us" not in text.getvalue()
    assert len(lines) < 30


def test_a_variant_of_others_leaves_the_colours_as_they_are() -> None:
    ours = [variant for variant in list_variants() if variant.has_kernels]
    looks = looks_of(one.name for one in ours)
    assert len(set(looks.values())) == len(looks) == len({one.name for one in ours})
    with mock.patch.dict(registry._variants):
        register(replace(ours[0], pattern="another"))
        assert looks_of([*looks, "another:portable"]).items() >= looks.items()
