"""Tables of measured times: what `iris-bench defaults` makes of sweeps, and the one that is shipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from iris_bench import cli
from iris_bench.records.csv_rows import append_records
from iris_bench.records.record import Record, read_records
from iris_bench.tune import cli as tune_cli
from iris_bench.tune.measured import tables
from iris_kernels.common.choice.measured import Key, file_name, shipped_table
from overlap_taxonomy import current_name

RESULTS = Path(__file__).parents[3] / "results"
GPU = "NVIDIA H200"
SWEEPS = {
    GPU: (
        *("tuning/h200x4-bf16", "2026-11-22-h200x4/large-bf16", "2026-11-22-h200x4/small-m-bf16"),
        *("tuning/sweep-bf16-1121-h200x1", "tuning/small-m-bf16-1122-h200x1", "tuning/ragged-bf16-1122-h200x1"),
        *("2026-11-26-h200x4/large-bf16", "2026-11-26-h200x4/small-m-bf16"),
        *("2026-11-26-h200x4/fp8-row", "2026-11-26-h200x4/paper-bf16"),
        *("2026-11-27-h200x4/small-m-bf16", "2026-11-27-h200x4/mid-m-bf16"),
        *("2026-11-28-h200x4/llama-bf16", "2026-11-28-h200x4/square-bf16"),
        *("2026-11-29-h200x2/fp8-block", "2026-11-29-h200x2/fp8-fast", "2026-11-29-h200x2/fp8-row"),
        *("2026-11-29-h200x2/layers-bf16", "2026-11-29-h200x2/layers-by-m-bf16", "2026-11-29-h200x2/llama-bf16"),
        *("2026-11-29-h200x2/mid-m-bf16", "2026-11-29-h200x2/ragged-bf16", "2026-11-29-h200x2/small-m-bf16"),
        "2026-11-29-h200x2/square-bf16",
        *("tuning/bulk-synchronous-library-bf16-1127-h200x2", "tuning/bulk-synchronous-library-fp8-1127-h200x2"),
    ),
    "NVIDIA H100 80GB HBM3": (
        "tuning/sweep-bf16-1124-h100x1",
        *("2026-11-28-h100x4/llama-bf16", "2026-11-28-h100x4/square-bf16", "2026-11-28-h100x4/small-m-bf16"),
    ),
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_every_shipped_table_has_its_sweeps() -> None:
    assert {file.name for file in tune_cli._SHIPPED.glob("*.json")} == set(map(file_name, SWEEPS))


@pytest.mark.parametrize("gpu", SWEEPS)
def test_the_command_that_makes_them_is_in_the_readme(gpu: str) -> None:
    text = (RESULTS / "README.md").read_text().replace("\\\n", "")
    commands = [line for line in text.splitlines() if line.startswith("iris-bench defaults ")]
    named = commands[[*SWEEPS].index(gpu)].removeprefix("iris-bench defaults")
    expanded = subprocess.run(["bash", "-c", f"echo {named}"], check=True, capture_output=True, text=True)
    *files, option = expanded.stdout.split()
    assert option == "--overwrite"
    assert files == [f"results/{name}.csv" for name in SWEEPS[gpu]]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", SWEEPS)
def test_the_shipped_times_are_those_of_the_sweeps(gpu: str, tmp_path: Path) -> None:
    files = [RESULTS / f"{name}.csv" for name in SWEEPS[gpu]]
    made = tmp_path / file_name(gpu)
    made.write_text("older")
    result = invoke("defaults", *files, "--out", tmp_path, "--overwrite")
    assert result.exit_code == 0, result.output
    assert [*tmp_path.iterdir()] == [made]
    text = made.read_text()
    assert text == (tune_cli._SHIPPED / made.name).read_text()
    # There the library's was found wrong.
    assert Key("gemm_all_reduce", 257, 4099, 2055, 1, "bfloat16") not in shipped_table(gpu)
    assert "auto" not in text
    assert "gemm_alone" not in text
    assert text.count("times_us") == len(shipped_table(gpu))


def test_defaults_refuses_what_is_no_sweep(tmp_path: Path) -> None:
    result = invoke("defaults", tmp_path / "none.csv", "--out", tmp_path)
    assert result.exit_code == 2
    assert "none.csv" in result.stderr


def test_defaults_writes_no_table_of_nothing(tmp_path: Path) -> None:
    rows = [row for row in read_records(RESULTS / "tuning/h200x2-rows512-bf16.csv") if row.variant != "library"]
    append_records(tmp_path / "bare.csv", rows)
    shipped = tmp_path / "nvidia-h200.json"
    shipped.write_text("kept")
    result = invoke("defaults", tmp_path / "bare.csv", "--out", tmp_path)
    assert result.exit_code == 2
    assert "times of library and of one of ours on NVIDIA H200" in result.stderr
    assert shipped.read_text() == "kept"


@pytest.mark.slow
def test_the_shipped_times_of_an_installed_package_are_written_where_it_looks(tmp_path: Path) -> None:
    """Not beside the source: there the package that is imported has another name and place."""
    for package, folder in (("iris_bench", "bench"), ("iris_kernels", "kernels")):
        shutil.copytree(RESULTS.parent / folder, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = """
from importlib import resources
from pathlib import Path
from iris_bench.tune import cli
print(Path(cli.__file__).parents[2], cli._SHIPPED, resources.files("iris_kernels.common.choice") / "measured_times")
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    place, written, read = said.stdout.split()
    assert place == str(tmp_path)
    assert written == read == str(tmp_path / "iris_kernels" / "common" / "choice" / "measured_times")


def test_times_of_kernels_that_are_no_more_are_left_out() -> None:
    """Those that read through pointers what is copied now; the copied ones stay, also where rank 0 copies none."""
    rows = read_records(RESULTS / "archive/ragged-1122-h200x2.csv")
    with pytest.raises(ValueError, match="times of bursts of 1, 10, which are not to be compared"):
        tables([*rows, replace(rows[0], m=rows[0].m + 1, burst=1)])
    (table,) = tables(rows).values()
    assert len(table) == 36
    assert all("fused_sequential:portable:stream_k" in measured.times_us for measured in table.values())
    old = [replace(row, config=row.config.replace("descriptors", "pointers").split(" copied")[0]) for row in rows]
    (of_old,) = tables(old).values()
    assert {(key.m, key.n, key.k) for key in of_old} == {(8182, 5120, 1024)}


def run_of(library_us: float, day: int, **times_us: float) -> list[Record]:
    """Return the rows of one run of one problem; names as they were, which are Python's."""
    row = next(row for row in read_records(RESULTS / "tuning/h200x2-rows512-bf16.csv") if row.time_us)
    return [
        replace(
            row,
            variant=current_name(row.family, name),
            time_us=time_us,
            library_us=library_us,
            timestamp=f"2026-01-{day:02}T00:00:00Z",
        )
        for name, time_us in {"library": library_us, **times_us}.items()
    ]


@pytest.mark.parametrize("is_later_first", [False, True])
def test_times_of_several_runs_are_in_the_last_ones_measure(is_later_first: bool) -> None:
    """A slower GPU's 99 µs, where the library's took 110, are 90 beside the library's 100."""
    runs = [run_of(110.0, 1, one_shot=120.0, copy_engine=99.0), run_of(100.0, 2, one_shot=95.0)]
    first, second = runs[::-1] if is_later_first else runs
    ((measured,),) = (table.values() for table in tables([*first, *second]).values())
    assert measured.times_us == pytest.approx(
        {"library": 100.0, "fused_sequential:portable:stream_k": 95.0, "copy_engine:portable": 90.0}
    )


@pytest.mark.parametrize("hosts_day", [1, 3])
def test_a_librarys_time_that_was_the_hosts_is_not_the_measure(hosts_day: int) -> None:
    """Other times of that run are taken as they are, the later of two, too."""
    runs = run_of(130.0, hosts_day, copy_engine=99.0, one_shot=96.0) + run_of(100.0, 2, one_shot=95.0)
    ((measured,),) = (table.values() for table in tables(runs).values())
    later = {1: 95.0, 3: 96.0}[hosts_day]
    assert measured.times_us == {
        "library": 100.0,
        "fused_sequential:portable:stream_k": later,
        "copy_engine:portable": 99.0,
    }


def test_what_was_wrong_since_has_no_time() -> None:
    runs = run_of(100.0, 1, one_shot=80.0, copy_engine=90.0)
    wrong = replace(runs[1], status="wrong", time_us=None, timestamp="2026-01-02T00:00:00Z")
    ((measured,),) = (table.values() for table in tables([wrong, *runs]).values())
    assert measured.times_us == {"library": 100.0, "copy_engine:portable": 90.0}


def test_a_time_of_auto_is_one_of_what_it_took() -> None:
    """Where that was not measured by its own name; the variant's own time comes first."""
    rows = run_of(100.0, 1, copy_engine=90.0)
    chosen = "auto: fused_sequential:portable:stream_k 128x128x128 group=8"
    auto = replace(rows[1], variant="auto", time_us=80.0, config=chosen)
    ((measured,),) = (table.values() for table in tables([*rows, auto]).values())
    assert measured.times_us == {
        "library": 100.0,
        "copy_engine:portable": 90.0,
        "fused_sequential:portable:stream_k": 80.0,
    }
    own = replace(rows[1], variant="fused_sequential:portable:stream_k", time_us=85.0)
    ((measured,),) = (table.values() for table in tables([*rows, auto, own]).values())
    assert measured.times_us["fused_sequential:portable:stream_k"] == 85.0
    failed = replace(own, status="wrong", time_us=None)
    ((measured,),) = (table.values() for table in tables([*rows, auto, failed]).values())
    assert measured.times_us == {"library": 100.0, "copy_engine:portable": 90.0}


def test_times_of_bursts_of_four_calls_are_compared_with_those_of_ten() -> None:
    rows = run_of(100.0, 1, copy_engine=90.0)
    assert tables([*rows, *(replace(row, m=row.m + 1, burst=4) for row in rows)])
    with pytest.raises(ValueError, match="times of bursts of 3, 10, which are not to be compared"):
        tables([*rows, *(replace(row, m=row.m + 1, burst=3) for row in rows)])
