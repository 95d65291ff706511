"""`iris-bench decoder`: what is right is told from what is wrong, and what cannot be measured has its reason."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks, context
from rich.console import Console
from torch.distributed.tensor import Partial, Replicate
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.benchmarks.decoder import float8, systems
from iris_bench.benchmarks.decoder import rank as bench
from iris_bench.benchmarks.decoder.models import MODELS
from iris_bench.benchmarks.decoder.plan import plan, still_to_do, to_records
from iris_bench.benchmarks.decoder.plot import plot_decoder
from iris_bench.benchmarks.decoder.record import DecoderRecord
from iris_bench.benchmarks.decoder.show import print_decoder
from iris_bench.measure import environment
from iris_bench.records.csv_rows import append_records
from iris_bench.records.record import read_as
from iris_kernels.common.calibration import timing
from iris_kernels.common.operators.operator import Operator

GIVEN: dict[str, Any] = {
    "model": "tiny",
    "layers": 2,
    "steps": {"prefill": "2x8"},
    "systems": ("torch", "torch_sequence", "iris", "iris_sequence", systems.LIMIT),
    "modes": ("eager",),
    "dtype": "fp32",
    "rounds": 1,
    "burst": 1,
    "seed": 0,
    "world_size": 2,
    "device": "cpu",
}
on_cpu = pytest.mark.parametrize("device", ["cpu"])


@pytest.fixture
def transformers() -> None:
    pytest.importorskip("transformers")


def measured(rank: int, world_size: int, job: bench.Job, spoil: str = "", what: str = "iris") -> list[bench.Outcome]:
    """Measure; `spoil` a layer's output, or one gradient, of one system on the last rank."""
    parallelise = systems.parallelise

    def wrong(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        factor = torch.ones(output.shape[1], 1)
        factor[-1] = 1.001  # of one token
        return output * factor

    def spoilt(ctx: Any, system: str, *args: Any, **options: Any) -> Any:
        model = parallelise(ctx, system, *args, **options)
        if spoil == "fails" and system == what:
            raise RuntimeError("it cannot be cut")
        if system == what and rank == world_size - 1:
            if spoil == "layer":
                model.layers[0].mlp.register_forward_hook(wrong)
            elif spoil == "gradient":
                model.layers[0].input_layernorm.weight.register_hook(lambda grad: grad * 1.001)
        return model

    with mock.patch.object(bench, "context", context), mock.patch.object(systems, "parallelise", spoilt):
        return bench.measure(rank, world_size, job)


@on_cpu
@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("phase", bench.PHASES)
def test_every_system_gives_what_the_whole_model_does(ranks: Callable[[int], Ranks], phase: str) -> None:
    """Outputs, and gradients of x and of all parameters; those without collectives are neither checked nor wrong."""
    (job,) = plan(**(GIVEN | {"steps": {phase: "2x8"}}))
    outcomes = ranks(2).call(measured, job)
    assert outcomes[0] == outcomes[1]
    for one in outcomes[0]:
        is_apart = phase == "decode" and systems.is_sequence(one.system)
        assert one.status == ("unsupported" if is_apart else "ok"), one.reason
        assert (one.error is not None) == (one.status == "ok" and one.system != systems.LIMIT)
        assert one.time_us is None  # interpreted times are no performance


def as_if_captured(rank: int, world_size: int, job: bench.Job) -> tuple[list[str], int]:
    """Measure as where graphs hold the calls of operators; return what came of it, and how many of these are left."""
    with mock.patch.object(Operator, "was_captured", True):
        outcomes = measured(rank, world_size, job)
    return [one.status for one in outcomes], len(context().operators)


@on_cpu
@pytest.mark.usefixtures("transformers")
def test_what_was_captured_is_given_back(ranks: Callable[[int], Ranks]) -> None:
    (job,) = plan(**(GIVEN | {"systems": ("iris",)}))
    assert ranks(2).call(as_if_captured, job) == [(["ok"], 0)] * 2


@on_cpu
@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("phase", "spoil", "wrong"),
    [
        ("prefill", "", ()),
        ("decode", "", ()),
        ("train", "", ()),
        ("prefill", "gathers", ("torch_sequence",)),
        ("train", "sums", ("torch", "torch_sequence")),
    ],
)
def test_every_system_multiplies_in_fp8_as_the_whole_model_does(
    ranks: Callable[[int], Ranks], phase: str, spoil: str, wrong: tuple[str, ...]
) -> None:
    """A token that is gathered with another's scale is seen, and a sum over ranks that is left out."""
    (job,) = plan(**(GIVEN | {"steps": {phase: "2x8"}, "dtype": "fp8"}))
    for outcomes in ranks(2).call(measured_in_fp8, job, spoil):
        for one in outcomes:
            is_apart = phase == "decode" and systems.is_sequence(one.system)
            assert one.status == ("unsupported" if is_apart else "wrong" if one.system in wrong else "ok"), one.reason


def measured_in_fp8(rank: int, world_size: int, job: bench.Job, spoil: str) -> list[bench.Outcome]:
    gather = float8._all_gather

    def spoilt(rows: torch.Tensor, group: Any) -> torch.Tensor:
        gathered = gather(rows, group)
        return gathered.roll(1, 0) if gathered.dtype == torch.float32 else gathered

    gathers = mock.patch.object(float8, "_all_gather", spoilt if spoil == "gathers" else gather)
    with gathers, mock.patch.object(float8, "Partial", Replicate if spoil == "sums" else Partial):
        return measured(rank, world_size, job)


@on_cpu
@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("spoil", "what", "phase", "status"),
    [
        ("layer", "iris", "prefill", "wrong"),
        ("layer", "torch_sequence", "prefill", "wrong"),
        ("gradient", "iris_sequence", "train", "wrong"),
        ("fails", "torch", "prefill", "error"),
    ],
)
def test_one_system_that_fails_leaves_the_others(
    ranks: Callable[[int], Ranks], spoil: str, what: str, phase: str, status: str
) -> None:
    """A token's output of one layer, or a gradient, is off by a thousandth on one rank of two; or nothing is made."""
    (job,) = plan(**(GIVEN | {"steps": {phase: "2x8"}, "layers": 1}))
    for outcomes in ranks(2).call(measured, job, spoil, what):
        assert {one.system: one.status for one in outcomes if one.status != "ok"} == {what: status}
        (found,) = (one for one in outcomes if one.system == what)
        assert ("off by" if status == "wrong" else "RuntimeError: it cannot be cut") in found.reason


def compile_them(rank: int, world_size: int, job: bench.Job) -> Any:
    """Measure what is compiled; return the graphs that were made, too."""
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        statuses = [(one.status, one.reason) for one in measured(rank, world_size, job)]
    return statuses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@on_cpu
@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("phase", "of"),
    [
        ("prefill", ("torch_sequence", "iris_sequence")),
        ("decode", ("torch", "iris")),
        ("train", ("torch_sequence", "iris_sequence")),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
def test_a_system_is_compiled_once_for_all_layers(
    ranks: Callable[[int], Ranks], phase: str, of: Any, dtype: str
) -> None:
    (job,) = plan(**(GIVEN | {"steps": {phase: "2x8"}, "systems": of, "modes": ("compiled",), "dtype": dtype}))
    assert ranks(2).call(compile_them, job) == [([("ok", "")] * 2, 2)] * 2


def time_them(rank: int, world_size: int, job: bench.Job) -> Any:
    """Measure with times, of the host's clock; a system is wrong once it was timed."""
    measure, spoil = timing.measure, []

    def timed(*args: Any, **options: Any) -> None:
        measure(*args, **options)
        spoil.append(1)

    off, patch = bench._off, mock.patch.object
    with patch(timing, "measure", timed), patch(bench, "_off", lambda *args: off(*args) + (1.0 if spoil else 0.0)):
        return measured(rank, world_size, replace(job, timed=True))


@on_cpu
@pytest.mark.usefixtures("transformers")
def test_what_is_right_is_timed_and_checked_again(ranks: Callable[[int], Ranks]) -> None:
    (job,) = plan(**(GIVEN | {"systems": ("torch", systems.LIMIT)}))
    for theirs, limit in ranks(2).call(time_them, job):
        assert (theirs.status, theirs.time_us, theirs.time_min_us) == ("wrong", None, None)
        assert limit.status == "ok"
        assert 0 < limit.time_min_us <= limit.time_us <= limit.time_max_us


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "gpt"}, "unknown model 'gpt'; known models: tiny, llama-3-8b, llama-3-70b"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; known dtypes: bf16, fp16, fp32, fp8"),
        ({"layers": 0}, "--layers 0 makes no sense"),
        ({"steps": {"prefill": "8192"}}, "unknown --prefill '8192'; it takes BATCHxTOKENS"),
        ({"steps": {"decode": "0x8"}}, "unknown --decode '0x8'"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(**(GIVEN | change))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("iris", "eager", "prefill", 8, 4, "cpu"), "2 key-value heads cannot be cut for 4 ranks"),
        (("async_tp", "compiled", "prefill", 8, 2, "cpu"), "need NVIDIA GPUs"),
        (("torch", "compiled_replayed", "prefill", 8, 2, "cpu"), "CUDA graphs need GPUs"),
        (("iris_sequence", "eager", "decode", 8, 2, "cpu"), "has one token of each sequence"),
        (("torch_sequence", "eager", "train", 7, 2, "cpu"), "sequences of 7 tokens cannot be cut for 2 ranks"),
        (("iris", "compiled", "decode", 7, 2, "cuda"), ""),
    ],
)
def test_what_cannot_be_measured_has_its_reason(arguments: Any, said: str) -> None:
    system, mode, *others = arguments
    found = systems.why_not(system, mode, MODELS["tiny"], *others)
    assert said in found
    assert bool(said) == bool(found)


def test_torch_overlaps_only_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    of_training = ("compiled", MODELS["llama-3-8b"], "train", 8192, 2, "cuda", "float8_e4m3fn")
    assert "fuses no product that is quantised behind the gather" in systems.why_not("async_tp", *of_training)
    for mode in systems.MODES:
        found = systems.why_not("async_tp", mode, MODELS["llama-3-8b"], "prefill", 8192, 2, "cuda")
        assert bool(found) == (mode in ("eager", "replayed"))


@pytest.mark.usefixtures("transformers")
def test_the_command_writes_rows_and_a_table_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "decoder.csv"
    command = ["decoder", "--device", "cpu", "--world-size", "2", "--system", "torch,iris", "--mode", "eager,replayed"]
    command += ["--phase", "decode", "--layers", "1", "--out", str(out)]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "decode 4x8 past" in done.output
    assert "2 of 2" in done.output
    assert "iris, unsupported: CUDA graphs need GPUs" in done.output
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [column.name for column in fields(DecoderRecord)]
    assert [(row["system"], row["mode"], row["status"]) for row in rows] == [
        (system, mode, "ok" if mode == "eager" else "unsupported")
        for system in ("torch", "iris")
        for mode in ("eager", "replayed")
    ]
    before = out.read_text()
    again = CliRunner().invoke(cli.app, [*command, "--resume"])
    assert again.exit_code == 0, again.output
    assert out.read_text() == before


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(cli.app, ["decoder", "--device", "cpu"])
    assert done.exit_code == 2
    assert "transformers, which is not installed: pip install 'iris-overlap[transformers]'" in done.output


@pytest.mark.parametrize("option", ["--system", "--mode", "--phase"])
@pytest.mark.usefixtures("transformers")
def test_an_unknown_name_is_refused(option: str) -> None:
    done = CliRunner().invoke(cli.app, ["decoder", "--device", "cpu", option, "nonsense"])
    assert done.exit_code == 2
    assert f"unknown {option} 'nonsense'; it takes 'all', or some of" in done.output


SETTING = {"world_size": 2, "device": "cuda"}
COLUMNS = {"device_name": "a GPU", "driver": "", "commit": "", "command": "", **SETTING, **environment.versions()}
TIMES = {("torch", "eager"): 9.0, ("torch_sequence", "compiled"): 6.0, ("iris", "eager"): 4.0}
TIMES |= {("iris", "compiled"): 3.0, (systems.LIMIT, "eager"): 2.0}


def rows(monkeypatch: pytest.MonkeyPatch) -> list[DecoderRecord]:
    """Return made-up rows of GPUs."""
    monkeypatch.setattr("iris_bench.benchmarks.decoder.plan.metadata.version", lambda name: "5.0")
    (job,) = plan(**(GIVEN | SETTING))
    outcomes = [
        bench.Outcome(*pair, time_us=us, time_min_us=0.9 * us, time_max_us=1.1 * us) for pair, us in TIMES.items()
    ]
    outcomes.append(bench.Outcome("iris_sequence", "eager", status="wrong", reason="a row is off"))
    return to_records(job, outcomes, COLUMNS)


def test_speedups_are_over_the_best_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = rows(monkeypatch)
    assert [one.speedup_vs_torch for one in records] == [6 / 9, 1, 1.5, 2, 3, None]
    assert [one.limit_over_time for one in records] == [2 / 9, 2 / 6, 0.5, 2 / 3, 1, None]
    out = tmp_path / "decoder.csv"
    append_records(out, records)
    console = Console(record=True, width=140)
    print_decoder(console, read_as(out, DecoderRecord))
    said = console.export_text()
    shown = r"prefill 2x8 +6 \(torch_sequence, compiled\) +3 \(iris, compiled\) +2\.00 +1\.64 to 2\.44 +0\.67 +4 of 5"
    assert re.search(shown, said)
    assert "iris_sequence, wrong: a row is off (prefill 2x8 eager)" in said
    plot_decoder(records, tmp_path / "decoder.svg")
    assert "<svg" in (tmp_path / "decoder.svg").read_text()
    with pytest.raises(ValueError, match="no step has a time of torch's"):
        plot_decoder(records[-1:], tmp_path / "decoder.svg")


def test_a_step_is_measured_with_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its speedups are of one run."""
    done = rows(monkeypatch)
    finished = plan(**(GIVEN | SETTING | {"systems": ("torch", "iris")}))
    assert still_to_do(finished, done, SETTING) == []
    missing = plan(**(GIVEN | SETTING | {"systems": ("iris_sequence",)}))
    (job,) = still_to_do(missing, done, SETTING)
    assert set(job.pairs) == {*TIMES, ("iris_sequence", "eager")}


def test_a_range_is_of_the_slowest_ranks() -> None:
    class Context:
        class control_plane:
            @staticmethod
            def all_gather(own: dict[str, list[float]]) -> list[dict[str, list[float]]]:
                return [own, {"x": [1.0, 7.0, 3.0]}]

    samples = [timing.Sample(us, us, us) for us in (2.0, 4.0, 5.0)]
    subject = timing.Subject("x", lambda a, b: None, samples)
    context: Any = Context()
    assert timing.slowest_ranges(context, [subject]) == {"x": (2.0, 7.0)}
