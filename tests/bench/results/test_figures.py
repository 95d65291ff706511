"""The documentation's tables and pictures are those that the CSVs make."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from iris_bench.figures.pages import pages, rewritten
from iris_bench.figures.pictures import PICTURES
from iris_bench.figures.results import MACHINES, RESULTS
from iris_bench.figures.tables import TABLES
from iris_bench.records import frames

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_those_of_the_csvs(page: Path) -> None:
    assert rewritten(page.read_text(), TABLES) == page.read_text(), "make figures"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_made(name: str) -> None:
    header, rule, *rows = TABLES[name]().splitlines()
    assert rows
    assert {line.count("|") for line in (rule, *rows)} == {header.count("|")}


def test_pictures_are_those_that_the_command_makes(tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "*.png", "*.svg"], capture_output=True, text=True, check=True
    ).stdout.split()
    measured = {name for name in tracked if name.startswith("results/") or name == "docs/img/speedup.svg"}
    assert measured == set(PICTURES)
    name = "docs/img/speedup.svg"
    PICTURES[name](tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["speedup.svg"]


def test_a_marker_is_rewritten_in_place() -> None:
    tables: dict[str, Callable[[], str]] = {"one": lambda: "| new |"}
    text = "before\n<!-- figures: one -->\n| old |\n<!-- end -->\nafter\n"
    assert rewritten(text, tables) == text.replace("old", "new")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- figures: two -->\n<!-- end -->\n", "no table is called 'two'; known tables: one"),
        ("<!-- figures: one -->\n", "without its <!-- end -->"),
        ("<!-- end -->\n", "or the other way round"),
    ],
)
def test_a_marker_that_names_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rewritten(text, {"one": lambda: ""})


def test_what_the_host_held_up_is_no_speedup() -> None:
    """`library` took 49 us for 64 rows, and 25 for 128."""
    best = MACHINES["h200x4"].best
    row = best[(best.family == "gemm_reduce_scatter") & (best.m == 64) & (best.k == 14336) & (best.n == 3584)]
    assert len(row) == 1
    assert row.held_up.all()


def test_the_front_page_has_the_figures_of_llama_70b() -> None:
    best = MACHINES["h200x4"].best
    best = best[best.m == 8192].set_index(["family", "n", "k"])
    text = " ".join((ROOT / "README.md").read_text().split())
    gate, down = best.loc[("all_gather_gemm", 28672, 8192)], best.loc[("gemm_reduce_scatter", 8192, 28672)]
    assert f"{gate.library / gate.time_us:.2f}× for `gate` with its all-gather (8192 × 28672 × 8192)" in text
    assert f"{down.library / down.time_us:.2f}× for `down` with its reduce-scatter (8192 × 8192 × 28672)" in text
    for row in (gate, down):
        assert f"{row.async_tp / row.time_us:.2f}× over async-TP on both" in text
    of_two = [line for line in TABLES["losses"]().splitlines() if line.startswith("| 2 × H200")]
    assert {line.rsplit(" | ", 1)[1] for line in of_two} == {"1 × 4099 × 8193 |"}
    assert {line.split(" | ")[3] for line in of_two} == {"1 of 48"}
    held_out = frames.read_frame(RESULTS / "auto-held-out-h200x2.csv")
    at = held_out[(held_out.family == "gemm_reduce_scatter") & (held_out.m == 200) & (held_out.n == 12288)]
    library = at[at.variant == "library"].time_us.item()
    ours = at[~at.variant.isin(["library", "auto", "gemm_alone", "communication_alone"])].time_us.min()
    assert "On two GPUs two cases lose, M = 1 with rows that are not on 16 bytes" in text
    assert f"reduce-scatter 200 × 12288 × 28672 ({library / ours:.2f}×)" in text
