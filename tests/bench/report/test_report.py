"""The documentation's tables and pictures, and the report, are those that the CSVs make."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.measure.families import FAMILIES
from iris_bench.measure.shapes import LLAMA_3_70B, QWEN_72B
from iris_bench.records import frames
from iris_bench.records.record import COLUMNS
from iris_bench.report import cli as report_cli
from iris_bench.report import evidence, provenance, tables
from iris_bench.report.evidence import (
    Machine,
    in_one_folder,
    in_time,
    kinds,
    machines,
    of_ours,
    rows_in,
    several,
    sweeps,
)
from iris_bench.report.gains import gains
from iris_bench.report.pages import blocks, pages, report_pages, rewritten
from iris_bench.report.pictures import pictures
from iris_bench.report.predictions import EXPLAIN_COMMAND, auto_over_fastest, predicted, taken_over_fastest
from iris_bench.report.targets import memory

ROOT = Path(__file__).parents[3]
KEPT = ("results/", "docs/img/report/", "docs/img/speedup")  # where pictures of measurements are
RESULTS = ROOT / "results"
FEW_ROWS = RESULTS / "2026-11-29-h200x2/small-m-bf16.csv"


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_those_of_the_csvs(page: Path) -> None:
    assert rewritten(page.read_text(), blocks()) == page.read_text(), "make report"


def test_every_table_can_be_made() -> None:
    for name, make in blocks().items():
        if name in ("explain", "paper-reached"):
            continue
        header, rule, *rows = make().split("\n\n")[-1].splitlines()
        assert rows, name
        assert {line.count("|") for line in (rule, *rows)} == {header.count("|")}, name


@pytest.mark.slow
@pytest.mark.parametrize("path", pictures())
def test_pictures_are_those_of_the_csvs(path: str, tmp_path: Path) -> None:
    committed = (ROOT / path).read_text()
    (drawn_with,) = re.findall(r"Matplotlib v([\d.]+)", committed)
    if drawn_with != matplotlib.__version__:
        pytest.skip(f"{path} was drawn with matplotlib {drawn_with}; {matplotlib.__version__} draws other paths")
    pictures()[path].draw(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text() == committed, "make report"


def test_no_other_picture_of_measurements_is_kept() -> None:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    kept = {name for name in listed if name.endswith((".png", ".svg")) and name.startswith(KEPT)}
    assert kept == set(pictures())


def cells_of(name: str) -> list[dict[str, str]]:
    """A table's rows, by the names of their columns."""
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in blocks()[name]().split("\n\n")[-1].splitlines()
    )
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_no_table_stands_twice() -> None:
    """A report's reader finds each in one place; those of results/README.md are its own."""
    texts = [page.read_text() for page in (*report_pages(ROOT), ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    named = re.findall(r"<!-- report: (\S+) -->", "\n".join(dict.fromkeys(texts)))
    assert len(named) > 25
    assert len(named) == len(set(named))


def test_explain_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    printed = CliRunner().invoke(cli.app, shlex.split(EXPLAIN_COMMAND)[1:])
    assert printed.exit_code == 0, printed.output
    fence, command, *shown, end = blocks()["explain"]().splitlines()
    assert (fence, command, end) == ("```", f"$ {EXPLAIN_COMMAND}", "```")
    assert shown == [line.rstrip() for line in printed.stdout.splitlines()]


def test_of_each_model_the_worst_layer_is_shown() -> None:
    shown = {row["model"]: row for row in cells_of("losses-by-model")}
    for model in (LLAMA_3_70B, QWEN_72B):
        speedups = {}
        for machine in several():
            for row in frames.rows_of(in_time(machine)):
                collective = FAMILIES[row.family].collective
                if (row.n, row.k) in model.layers(collective).values():
                    speedups[machine.title, row.family, row.m, row.n, row.k] = row.library / row.time_us
        gpus, _, m, _, _ = min(speedups, key=lambda key: speedups[key])
        row = shown[model.name]
        assert (row["GPUs"], row["M"], row["speedup"]) == (gpus, str(m), f"{min(speedups.values()):.2f}×")
        counts = [cell.split(" of ") for name, cell in row.items() if name.startswith("slower at")]
        assert sum(int(slower) for slower, _ in counts) == sum(ratio < 1 for ratio in speedups.values())
        assert sum(int(of) for _, of in counts) == len(speedups)


def number_in(cell: str) -> float:
    """Return the number in a cell, which may be marked."""
    return float(cell.rstrip(" †"))


def test_the_most_that_can_be_gained_is_torchs_best_over_the_limit() -> None:
    rows = cells_of("decoder")
    assert len(rows) > 10
    for row in rows:
        torchs = min(number_in(row[name]) for name in ("`torch`", "`torch_sequence`", "`async_tp`") if row[name])
        assert float(row["most that can be gained"]) == pytest.approx(
            torchs / number_in(row["`no_communication`"]), rel=0.02
        )


def test_a_speedup_is_within_what_it_is_between_rounds() -> None:
    rows = cells_of("decoder")
    for row in rows:
        least, most = map(float, row["between rounds"].split(" to "))
        assert least <= float(row["over torch's best"]) <= most
    assert any(row["between rounds"] for row in rows)


def test_where_torch_is_faster_is_where_its_time_is_shorter() -> None:
    """Of layers as of whole steps, which the table of decoders has in milliseconds."""
    rows = cells_of("losses-to-others")
    assert all(float(row["speedup"].rstrip("×")) <= 1 for row in rows)
    layers = sum(
        int((in_time(machine).time_us > in_time(machine)[name]).sum())
        for machine in several()
        for name in evidence.OTHERS
    )
    steps = 0
    for row in cells_of("decoder"):
        torchs = min(number_in(row[name]) for name in ("`torch`", "`torch_sequence`", "`async_tp`") if row[name])
        steps += sum(number_in(row[name]) > torchs for name in ("`iris`", "`iris_sequence`") if row[name])
    assert layers > 0 < steps
    assert len(rows) == layers + steps


def test_every_column_is_explained_once() -> None:
    named = [name.strip(" `") for row in cells_of("columns") for name in row["column"].split(",")]
    assert named == list(COLUMNS)


def test_auto_is_compared_with_what_it_took() -> None:
    """Each problem in which it was measured has the variant that it took, which took the host nearly as long."""
    last = cells_of("h200x2-host")[-1]
    assert last["variant"] == "`auto`, beyond the variant that it took"
    rows = machines()["h200x2"].rows
    for family, name in (("gemm_all_scatter", "all-scatter"), ("gemm_all_reduce", "all-reduce")):
        more, problems = re.fullmatch(r"([+-][\d.]+) \((\d+) problems\)", last[name]).groups()
        assert abs(float(more)) < 4
        assert int(problems) == ((rows.variant == "auto") & (rows.family == family) & (rows.status == "ok")).sum()


def test_whether_the_papers_figure_is_reached_is_what_its_table_says() -> None:
    said = blocks()["paper-reached"]()
    speedups = [float(row["fastest of the paper's patterns"].rstrip("×")) for row in cells_of("paper")[1:]]
    assert said.startswith("Yes" if max(speedups) >= 1.79 else "No")
    assert f"{max(speedups):.2f}×" in said


def test_a_marker_is_rewritten_in_place() -> None:
    tables: dict[str, Callable[[], str]] = {"one": lambda: "| new |"}
    text = "before\n<!-- report: one -->\n| old |\n<!-- end -->\nafter\n"
    assert rewritten(text, tables) == text.replace("old", "new")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- report: two -->\n<!-- end -->\n", "no table is called 'two'; known tables: one"),
        ("<!-- report: one -->\n", "without its <!-- end -->"),
        ("<!-- end -->\n", "or the other way round"),
    ],
)
def test_a_marker_that_names_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rewritten(text, {"one": lambda: ""})


def test_what_the_host_held_up_is_no_speedup() -> None:
    """`library` took 49 us for 64 rows, and 25 for 128."""
    rows = evidence.best_of(frames.read_frame(RESULTS / "2026-11-22-h200x4/small-m-bf16.csv"))
    row = rows[(rows.family == "gemm_reduce_scatter") & (rows.m == 64) & (rows.k == 14336) & (rows.n == 3584)]
    assert len(row) == 1
    assert row.held_up.all()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another folder of results, read anew."""
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    monkeypatch.setattr(report_cli, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "RESULTS", tmp_path)
    _read_anew()
    yield tmp_path
    _read_anew()


def _read_anew() -> None:
    for cached in (kinds, rows_in, sweeps, machines, blocks, pictures):
        cached.cache_clear()


def test_csvs_are_found_in_every_folder_but_those_left_out(folders: Path) -> None:
    for folder in (".", "2026-11-22-h200x4", "archive", "local", "tuning"):
        (folders / folder).mkdir(exist_ok=True)
        shutil.copy(FEW_ROWS, folders / folder)
    assert evidence.csvs() == [folders / "2026-11-22-h200x4/small-m-bf16.csv", folders / "small-m-bf16.csv"]


def test_the_newest_folder_counts_but_no_experiment(folders: Path) -> None:
    """Of a problem that two folders have; sizes that were given, not named, replace nothing."""
    text = FEW_ROWS.read_text()
    other = {
        "older": text.replace("2026-11-29T", "2026-11-27T"),
        "newer": text.replace("2026-11-29T", "2026-11-28T"),
        "experiment": text.replace(",small_m,", ",explicit,"),
    }
    for name, of_folder in other.items():
        (folders / name).mkdir()
        (folders / name / "rows.csv").write_text(of_folder)
    rows = sweeps()
    assert set(rows.folder) == set(other)
    chosen = in_one_folder(rows, of_ours(rows))
    assert set(chosen.folder) == {"newer"}
    assert len(chosen) == len(rows) // 3


def test_a_folder_of_another_machine_is_shown_without_being_named_anywhere(folders: Path) -> None:
    text = FEW_ROWS.read_text()
    (folders / "2026-12-01-h100x2").mkdir()
    (folders / "2026-12-01-h100x2/any.csv").write_text(text.replace("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    (folders / "half.csv").write_text(text.replace(",bf16,", ",fp16,"))
    assert {name: set(machine.rows.folder) for name, machine in machines().items()} == {"h100x2": {"2026-12-01-h100x2"}}
    assert list(machines("fp16")) == ["h200x2"]
    assert evidence.dtypes() == ["bf16", "fp16"]
    assert len(machines()["h100x2"].best) == len(machines("fp16")["h200x2"].best) > 40


def test_the_report_of_nothing_is_refused(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        report_cli.make_report()
    assert ended.value.exit_code == 2
    assert f"no CSV of iris-bench run is in {folders}" in " ".join(capsys.readouterr().err.split())


def test_of_each_machine_the_newest_calls_are_shown(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", folders)
    kept = RESULTS / "2026-11-27-h100x2/host.csv"
    other, newer = folders / "a" / "host.csv", folders / "b" / "host.csv"
    for path in (other, newer):
        path.parent.mkdir()
    shutil.copy(kept, newer.parent / "older.csv")
    frame = pd.read_csv(kept, dtype=str, keep_default_na=False)
    frame.assign(device_name="NVIDIA H200").to_csv(other, index=False)
    changed = {"timestamp": "2026-11-28T00:00:00Z", "median_us": "77", "commit": "abc", "variant": "library"}
    frame.assign(config="", **changed).to_csv(newer, index=False)
    of_h200, of_h100 = sorted(tables.host_calls().split("\n\n2 × H"), key=lambda part: "/b/host.csv" in part)
    assert "00 ([rows](../../results/a/host.csv), at `495dcafb`):" in of_h200
    assert "100 ([rows](../../results/b/host.csv), at `abc`):" in of_h100
    assert "older.csv" not in of_h100 + of_h200
    assert "reduce-scatter 4096, 4096, 4096, `auto`: `warp_specialized:sm90`" in of_h200
    assert "reduce-scatter 4096, 4096, 4096, `library`" in of_h100
    assert "| operator, first call of another M | 77.0 (43.1 to 64.4) |" in of_h100
    assert "| operator, first call of another M | 51.7 (43.1 to 64.4) |" in of_h200


def test_times_of_a_step_are_of_one_run_and_its_memory_is_the_newest(folders: Path) -> None:
    """A newer run of two systems hides no other's time."""
    whole = pd.read_csv(RESULTS / "2026-11-27-h200x2/decoder-fp8.csv", dtype=str, keep_default_na=False)
    few = whole[(whole["mode"] == "compiled") & whole.system.isin(["torch_sequence", "iris_sequence"])]
    for name, rows, day in (("older", whole, "28"), ("newer", few.assign(peak_bytes=str(7 << 20)), "29")):
        (folders / name).mkdir()
        rows.assign(timestamp=f"2026-11-{day}T00:00:00Z").to_csv(folders / name / "decoder.csv", index=False)
    (step,) = evidence.decoder_steps()
    assert len(step) == len(whole)
    assert memory().endswith("| 7 | 7 met |")
    whole.assign(timestamp="2026-11-30T00:00:00Z", time_us="5").to_csv(folders / "newer" / "all.csv", index=False)
    _read_anew()
    assert {row.time_us for row in evidence.decoder_steps()[0] if row.status == "ok"} == {5.0}


def test_the_parts_of_a_gain_are_all_of_it() -> None:
    found = [one for machine in several() for one in gains(machine)]
    assert len(found) > 40
    assert {one.family for one in found} == set(evidence.FAMILIES)
    for one in found:
        parts = (one.layout_us, one.overlap_us, one.gemm_us, one.exposed_us)
        assert all(part >= 0 for part in parts[::2]), one
        assert one.baseline_us - one.time_us == pytest.approx(sum(parts[:3]))
        assert one.time_us - one.alone_us == pytest.approx(one.exposed_us - one.gemm_us)
        assert one.layout_us == 0 or one.family == "gemm_all_scatter"


def test_what_was_lost_by_a_prediction_is_at_least_nothing() -> None:
    rows = predicted(machines()["h200x2"])
    for over in (taken_over_fastest(rows), auto_over_fastest(rows)):
        assert len(over) > 60
    assert taken_over_fastest(rows).min() == 1.0
    right = rows.assign(predicted_us=rows.time_us.where(rows.predicted_us.notna()))
    assert taken_over_fastest(right).max() == 1.0


def test_a_machine_is_named_as_its_folders_are() -> None:
    assert Machine("NVIDIA H100 80GB HBM3", 4).name == "h100x4"
    assert Machine("NVIDIA H200", 2).title == "2 × H200"
    assert Machine("NVIDIA H200, 2 hosts", 2).title == "2 × H200"
    for folder in {name for machine in machines().values() for name in machine.rows.folder}:
        assert folder.split("-")[3] in machines()


MEASURED = ("decoder", "links", "link-sizes", "ccl", "epilogue", "fp8", "norms", "two-hosts", "paper", "h200x2-host")


def test_targets_are_shown_of_what_there_is(folders: Path) -> None:
    """Of a run that was ended early, some families, ways and systems are missing."""
    for machine in ("h100x4", "h200x2", "h200x4"):
        folder = folders / f"2026-12-01-{machine}"
        folder.mkdir()
        for path in RESULTS.glob(f"2026-*-{machine}/*.csv"):
            rows = pd.read_csv(path, dtype=str, keep_default_na=False)
            for column, gone in (("family", "gemm_reduce_scatter"), ("way", "unfused"), ("way", "mm")):
                if column in rows:
                    rows = rows[rows[column] != gone]
            rows.to_csv(folder / path.name, index=False)
    _read_anew()
    for name, make in blocks().items():
        if name.startswith("targets-"):
            assert "nan" not in make(), name


def test_a_new_folder_takes_the_place_of_older_ones(folders: Path) -> None:
    """In every table, of what it has; other machines and the older runs' stress stay."""
    older = folders / "2026-11-29-h200x2"
    for folder in ("2026-11-28-h200x2", "2026-11-29-h200x2"):
        shutil.copytree(RESULTS / folder, older, dirs_exist_ok=True)
    shutil.copytree(RESULTS / "2026-11-26-h200x4", folders / "2026-11-26-h200x4")
    before = {name: blocks()[name]() for name in (*MEASURED, "stress")}
    new = folders / "2026-12-01-h200x2"
    new.mkdir()
    for path in older.glob("*.csv"):
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        rows["timestamp"] = rows.timestamp.str.replace("2026-11-2.", "2026-12-01", regex=True)
        for column in {"time_us", "host_us", "library_us", "gbps"} & set(rows):
            rows[column] = [f"{3 * float(value):.6g}" if value else "" for value in rows[column]]
        rows.to_csv(new / path.name, index=False)
    header, row = (folders / "2026-11-26-h200x4" / "stress.csv").read_text().splitlines()
    (new / "stress.csv").write_text(
        f"{header}\n{row.replace('19fdd3d', 'fffffff').replace('2026-11-26T', '2026-12-01T')}\n"
    )
    _read_anew()
    both = {name: blocks()[name]() for name in (*MEASURED, "stress")}
    assert both["stress"].startswith(before["stress"])
    assert both["stress"].endswith("`fffffff` |")
    shutil.rmtree(older)
    _read_anew()
    for name in MEASURED:
        assert both[name] == blocks()[name](), name
        assert both[name] != before[name] or name == "paper", name
