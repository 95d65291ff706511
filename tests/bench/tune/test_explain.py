"""`iris-bench explain` and `iris-bench model --evaluate`: what `auto` takes, why, and how good that is; no GPU."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from records import ENVIRONMENT, LINK, make_plan
from typer.testing import CliRunner, Result

from iris_bench import cli
from iris_bench.measure.job import Outcome
from iris_bench.measure.shapes import Shape
from iris_bench.measure.sweep import to_records
from iris_bench.records.csv_rows import append_records
from iris_bench.tune.evaluate import HIDDEN, MEASURED, judge, verdict
from iris_bench.tune.explain import explain, gpu_name
from iris_kernels.common.calibration.kept import machine_in, to_text
from iris_kernels.common.choice import ranking
from iris_kernels.common.choice.measured import Key, Measured, Table, all_shipped_tables
from overlap_taxonomy import MACHINES, Work, machine_for, predict_us

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
FAMILY = "gemm_reduce_scatter"
OURS = "fused_sequential:portable:stream_k"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))


def test_a_choice_is_explained_in_tables_a_csv_and_a_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "why.csv", tmp_path / "why.png"
    arguments = ("explain", "300x8192x28672", "--family", FAMILY, "--gpu", "h100", "--world-size", 2)
    result = invoke(*arguments, "--out", out, "--plot", plot)
    assert result.exit_code == 0, result.output
    for said in ("PREDICTION, constants of another machine", "auto takes", "320 rows", "ideal, predicted", "2 x H200"):
        assert said in result.stdout
    assert plot.stat().st_size > 10_000
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["variant"] == "library"
    assert sum(row["is_chosen"] == "True" for row in rows) == 1
    for row in rows:
        parts = sum(float(row[name]) for name in ("work_us", "wait_us", "latency_us"))
        assert parts == pytest.approx(float(row["model_us"]), rel=0.01)
        may_be_taken = row["must_be_below"] and float(row["over_library"]) < float(row["must_be_below"])
        assert may_be_taken or row["is_chosen"] == "False" or row["variant"] == "library"
    contenders = {row["variant"] for row in rows if row["must_be_below"]}
    assert "fused_sequential:portable:stream_k" in contenders
    assert "bulk_synchronous:portable" not in contenders  # never the fastest of those that were measured
    assert invoke(*arguments, "--out", out).exit_code == 2  # it is there


def test_where_the_problem_was_measured_no_prediction_is_compared(tmp_path: Path) -> None:
    out = tmp_path / "why.csv"
    asked = ("explain", "256x8192x28672", "--family", FAMILY, "--gpu", "H200", "--world-size", 4)
    result = invoke(*asked, "--out", out)
    assert result.stdout.startswith("MEASURED")
    with out.open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert {row["must_be_below"] for row in rows.values()} == {""}
    (taken,) = (name for name, row in rows.items() if row["is_chosen"] == "True")
    assert taken == min(rows, key=lambda name: float(rows[name]["measured_us"] or math.inf))
    (shown,) = (line for line in result.stdout.splitlines() if line.startswith(f" * {taken}") and "0.0" in line)
    assert len(shown.split()) == 6  # *, variant, us, over library, doubt, measured us


def test_fp8_is_explained_by_its_kind_of_scales() -> None:
    asked = ("explain", "4096x4096x4096", "--family", "all_gather_gemm", "--gpu", "H200", "--world-size", 2)
    given = ((), ("--scales", "block"), ("--fast-accum",))
    said = [invoke(*asked, "--dtype", "fp8", *options).stdout for options in given]
    assert len(set(said)) == 3
    assert all(text.startswith("MEASURED") for text in said)
    assert "are of --dtype fp8, not bf16" in invoke(*asked, "--scales", "row").stderr


def test_what_is_nearest_and_was_measured_is_shown() -> None:
    measured = explain(H200, 4, FAMILY, Shape(256, 8192, 28672), torch.bfloat16)
    assert measured.choice.why == "measured"
    assert measured.candidates[0].measured_us
    assert [near.distance for near in measured.nearest] == sorted(near.distance for near in measured.nearest)
    assert measured.nearest[0].distance == 0.0
    assert measured.nearest[0].evidence.key == Key(FAMILY, 256, 8192, 28672, 4, "bfloat16")
    assert 0.5 < measured.nearest[0].over_library <= 1.0
    assert measured.ideal_us < min(one.us for one in measured.candidates)
    elsewhere = explain(H200, 4, "gemm_all_scatter", Shape(8192, 28672, 8192), torch.bfloat16)
    assert elsewhere.choice.variant == "warp_specialized:sm90"  # for Hopper GPUs, which need not be here
    amd = explain("AMD Instinct MI300X", 8, FAMILY, Shape(256, 8192, 28672), torch.bfloat16)
    assert not amd.nearest
    assert not [one for one in amd.candidates if "sm90" in one.variant]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("8x8x8", "--gpu", "A100"), "unknown GPU 'A100'; known GPUs: H200, H100 80GB HBM3, MI300X"),
        (("8x8x8", "--gpu", "H"), "several GPUs are 'H'"),
        (("8x8x8", "--family", "gemm"), "unknown family 'gemm'; known families:"),
        (("8x8x8", "--family", "all"), "--family takes one family, not 'all'"),
        (("8x8", "--gpu", "H200"), "unknown shape '8x8'"),
        (("square",), "explain takes one shape, e.g. 8192x4096x14336"),
        (("8x8x8", "--dtype", "int4"), "unknown dtype 'int4'; known dtypes: bf16, fp16, fp32"),
        (("8x8x8", "--plot", "why.txt"), "no picture"),
    ],
)
def test_what_cannot_be_explained_is_refused(changed: tuple[str, ...], said: str) -> None:
    family = () if "--family" in changed else ("--family", FAMILY)
    result = invoke("explain", *changed, *family)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_gpus_are_named_by_a_part_of_their_names() -> None:
    found = [gpu_name(name) for name in ("H100", "H100 80GB HBM3", "h200", "H200", "mi300x", "MI300X", H100)]
    assert found == [H100, H100, H200, H200, "AMD Instinct MI300X", "AMD Instinct MI300X", H100]


def test_a_part_of_a_name_finds_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for gpu in (("--gpu", "H200"), ()):  # or none, and no GPU here
        result = invoke("explain", "256x8192x28672", "--family", FAMILY, "--world-size", 4, *gpu)
        assert "auto takes" in result.stdout
        assert "(measured)" in result.stdout
        assert "PREDICTION" not in result.stdout


def table(m: int, *, library: float, ours: float) -> Table:
    """A problem that takes so many times what the model says."""
    key, machine = Key(FAMILY, m, 8192, 28672, 2, "bfloat16"), machine_for(H200, 2)
    assert machine
    work = Work(FAMILY, m, 8192, 28672, 2)
    factors = {"library": library, OURS: ours}
    return {key: Measured({name: factor * (predict_us(machine, name, work) or 0) for name, factor in factors.items()})}


def test_a_problem_is_judged_by_times_that_are_hidden_when_it_is_chosen() -> None:
    """There the library is three times as fast as the other says; nothing else is known."""
    asked = table(256, library=1.0, ours=3.0)
    other = table(512, library=3.0, ours=1.0)
    times = next(iter(asked.values())).times_us
    known = {H200: {**asked, **other}}
    (fooled,) = judge({H200: asked}, known, "the problem")
    assert fooled.chosen == OURS
    assert fooled.over_best == fooled.over_library == pytest.approx(times[OURS] / times["library"])
    assert fooled.errors["library"] > math.log(1.5)
    (blind,) = judge({H200: asked}, known, "its N and K")
    assert blind.errors["library"] == pytest.approx(0.0)
    assert verdict([fooled, blind]).problems == 2
    assert verdict([fooled]).slower == 1


@pytest.mark.parametrize(("close", "made"), [(0.0, 2), (10.0, 1)])
def test_what_is_judged_is_what_is_made(close: float, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that is the fastest with few rows is not made where another's place there is close enough."""
    monkeypatch.setattr(ranking, "CLOSE", close)
    machine, names = MACHINES["h200x2"], ("library", "fused_sequential:portable:stream_k", "warp_specialized:sm90")
    works = [Work(FAMILY, m, 8192, 28672, 2) for m in (64, 8192)]
    asked = {
        Key(FAMILY, work.m, work.n, work.k, 2, "bfloat16"): Measured(
            {name: predict_us(machine, name, work) or 0.0 for name in names}
        )
        for work in works
    }
    assert len({one.chosen for one in judge({H200: asked}, {}, "everything")}) == made


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [H200, H100])
def test_auto_is_good_at_problems_that_no_table_has(gpu: str) -> None:
    """A third of the problems. The bounds are a little above the figures in results/notebook_small_m.md."""
    shipped = all_shipped_tables()
    asked = dict([*shipped[gpu].items()][::3])
    for hidden, mean, good in (("the problem", 1.015, 0.85), ("its N and K", 1.02, 0.8)):
        judged = list(judge({gpu: asked}, shipped, hidden))
        for world_size in {one.key.world_size for one in judged}:
            out = verdict([one for one in judged if one.key.world_size == world_size])
            assert out.over_best[0] < mean
            assert out.good > good
            assert out.over_library[1] < (1.25 if world_size == 1 else 1.15)
            assert out.slower <= (5 if world_size == 1 else 2)
            assert out.error[0] < 0.04


def test_the_command_evaluates_the_problems_of_csvs() -> None:
    results = Path(__file__).parents[3] / "results"
    result = invoke("model", "--evaluate", results / "tuning/h200x2-rows512-bf16.csv", "--each")
    assert result.exit_code == 0, result.output
    assert "512x11008x4096" in result.stdout
    for hidden in HIDDEN:
        assert hidden in result.stdout
    assert MEASURED not in result.stdout.partition("What auto takes")[0].split()  # there are no rows of auto
    refused = invoke("model", "--evaluate", "--machine", "h200x2")
    assert refused.exit_code == 2
    assert "--evaluate takes CSVs, --calibration and --each alone" in refused.stderr


def test_a_calibration_of_elsewhere_takes_the_place_of_the_constants(tmp_path: Path) -> None:
    """With a collective that takes ten times as long, ours are predicted to be faster, where nothing was measured."""
    facts = {"gpu": H100, "world_size": 2, "num_sms": 132, "l2_bytes": 1 << 25, "is_amd": False, "is_hopper": True}
    slow, file = {"collective_gbps": 20.0, "small_collective_gbps": 20.0}, tmp_path / "calibration.json"
    file.write_text(to_text(facts, slow).replace(torch.__version__, "another"))
    asked = table(3000, library=1.0, ours=0.9)
    (before,) = judge({H100: asked}, {}, "everything")
    (after,) = judge({H100: asked}, {}, "everything", machine_in(file.read_text(), is_of_here=False))
    assert before.errors["library"] + 0.5 < after.errors["library"]
    assert after.errors[OURS] == pytest.approx(before.errors[OURS])
    predicted = invoke("model", "--calibration", file, "--shapes", "3000x8192x28672")
    assert "h100x2 (model; its constants were measured)" in predicted.stdout
    refused = invoke("model", "--calibration", tmp_path / "none.json")
    assert refused.exit_code == 2
    assert "cannot use --calibration" in refused.stderr
    assert "leave --machine out" in invoke("model", "--calibration", file, "--machine", "h200x2").stderr


def test_auto_is_judged_by_its_own_times_where_it_was_measured(tmp_path: Path) -> None:
    """As `run --shapes held_out` leaves them, which was cut off in its second problem."""
    plan, rows = make_plan(families=FAMILY, world_size=2, shapes="300x12288x28672,3000x5120x17408"), []
    times = {"library": 188.0, OURS: 303.0, "warp_specialized:sm90": 200.0, "auto": 303.0}
    for job, scale in zip(plan.jobs, (1.0, 10.0), strict=True):
        outcomes = [Outcome(name, correct=True, error=0.0, time_us=scale * us) for name, us in times.items()]
        rows += to_records(plan, job, outcomes, ENVIRONMENT | {"device_name": H100}, LINK)
    append_records(tmp_path / "held-out.csv", rows[:-1])  # of the second problem without auto
    result = invoke("model", "--evaluate", tmp_path / "held-out.csv", "--each")
    assert result.exit_code == 0, result.output
    found = [line.split() for line in result.stdout.splitlines()]
    (measured,) = [line for line in found if line[3:4] == [MEASURED]]
    assert measured[-8:] == ["1", "1.612,", "1.612,", "1.612", "0%", "1.612,", "1.612", "1"]
    (blind,) = [line for line in found if line[3:4] == ["everything"]]
    assert blind[4] == "2"
