"""The tuner: what it tries, what it keeps, and the commands `tune` and `defaults`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from families import FUSED, make_problem, name
from ranks import Ranks, close_context
from typer.testing import CliRunner, Result

from iris_bench import cli
from iris_bench.command import ranks as bench_ranks
from iris_bench.measure import job as measure
from iris_bench.measure.job import Outcome
from iris_bench.measure.shapes import Shape
from iris_bench.tune import candidates
from iris_bench.tune.candidates import Tuned, neighbours
from iris_core.rendezvous import rank_info
from iris_kernels.common.choice.measured import Key
from iris_kernels.common.choice.tuning_cache import read_cache
from iris_kernels.common.config import GemmConfig, default_config
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.portable.stream_k_host import default_stream_k_config
from overlap_taxonomy import Variant, get_variant, list_families, list_variants

RESULTS = Path(__file__).parents[3] / "results"
GPU = "NVIDIA H200"


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_neighbours_are_valid_different_and_few(variant: Variant) -> None:
    problem = make_problem(variant.family, 8192, 8192, 8192, 4, torch.bfloat16)
    default = default_config("sm_90", 132, m=8192, n=2048, dtype=torch.bfloat16, comm_share=0.1)
    if variant.unsupported_reason(problem, default):
        default = replace(default, descriptors=False)
    found = list(neighbours(variant, problem, default))
    assert 3 <= len(found) <= 8
    assert len({default, *found}) == len(found) + 1
    for config in found:
        assert variant.unsupported_reason(problem, config) is None


@pytest.mark.parametrize(
    "variant", [variant for variant in FUSED if variant.name == "fused_sequential:portable:stream_k"], ids=name
)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 14336), (512, 7168, 8192)])
def test_few_rows_have_other_tilings(variant: Variant, m: int, n: int, k: int) -> None:
    problem = make_problem(variant.family, m, n, k, 4, torch.bfloat16)
    default = default_stream_k_config("sm_90", 132, m=m, n=n, k=k, dtype=torch.bfloat16)
    found = list(neighbours(variant, problem, default))
    assert {config.block_m for config in found} == {default.block_m}  # as low as the output
    same_tiles = {config.splits for config in found if config.block_n == default.block_n} - {default.splits}
    assert same_tiles == {default.splits + 1, default.splits - 1, 2 * default.splits} - {0, default.splits}
    same_tiling = {config.num_stages for config in found if config == replace(default, num_stages=config.num_stages)}
    assert same_tiling == {stages for stages in (default.num_stages - 1, default.num_stages - 2) if stages >= 4}
    assert {config.block_n for config in found} >= {64, 128}
    for config in found:
        assert 2 * (config.block_m + config.block_n) * config.block_k * config.num_stages <= 227 << 10, config


@pytest.mark.parametrize("variant", [one for one in list_variants() if one.name.startswith("warp_special")], ids=name)
def test_warp_groups_are_tried_in_turns_and_chunks_where_they_can_be(variant: Variant) -> None:
    config = GemmConfig(128, 256, 64, comm_rows=32)
    for k, chunks in ((8192, {1, 2}), (512, {1})):
        whole_k = k * (4 if "reduce" in variant.family else 1)
        problem = make_problem(variant.family, 8192, 8192, whole_k, 4, torch.bfloat16)
        with mock.patch.object(hopper, "machine_reason", return_value=None):
            found = list(neighbours(variant, problem, config))
        (in_turns,) = [other for other in found if other.pingpong]
        assert (in_turns.block_n, in_turns.splits) == (128, 1)
        splits = variant.family == "gemm_all_scatter" or variant.name.endswith("copies")
        assert {other.splits for other in found} == ({1, 2, 4} if splits else {1})
        assert {other.k_chunks for other in found} == (chunks if variant.name.endswith("copies") else {1})


def test_where_warp_groups_take_turns_other_tiles_are_tried_without() -> None:
    variant = get_variant("gemm_all_scatter", "warp_specialized:sm90")
    default = GemmConfig(128, 128, 64, num_stages=5, comm_rows=32, pingpong=True)
    problem = make_problem(variant.family, 8192, 8192, 8192, 2, torch.bfloat16)
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        found = list(neighbours(variant, problem, default))
    assert {(one.block_n, one.pingpong) for one in found} >= {(256, False), (128, False), (64, False)}


def test_the_best_time_is_kept_with_its_configuration() -> None:
    tuned = Tuned()
    config = default_config("sm_90", 132, m=8192, n=2048, dtype=torch.bfloat16)
    tuned.keep("copy_engine:portable", Outcome("copy_engine:portable", time_us=10.0))
    tuned.keep("copy_engine:portable", Outcome("copy_engine:portable 0", time_us=12.0), config)
    assert tuned.configs == {}
    tuned.keep("copy_engine:portable", Outcome("copy_engine:portable 1", time_us=8.0), config)
    tuned.keep(
        "copy_engine:portable", Outcome("copy_engine:portable 2", status="wrong", reason="x", time_us=1.0), config
    )
    tuned.keep("fused_sequential:portable", Outcome("fused_sequential:portable", status="wrong", reason="x"))
    assert tuned.times_us == {"copy_engine:portable": 8.0}
    assert tuned.configs["copy_engine:portable"]["block_m"] == config.block_m
    assert tuned.failed == {"fused_sequential:portable": "wrong: x"}


@pytest.mark.parametrize(
    ("clock", "held_up"),
    [
        (0.9, {}),
        (1.0, {"library": 117 / 31}),
        (0.9, {"library": 117 / 31, "communication_alone": 4.0}),
        (1.1, {"library": 0.2, "gemm_alone": 3.0}),
        (1.0, {"library": 4.0, "gemm_alone": 4.0, "communication_alone": 4.0}),
    ],
)
def test_runs_are_compared_by_the_librarys_times_in_each(clock: float, held_up: dict[str, float]) -> None:
    """A run in which all is a tenth faster finds nothing better, nor one in which the host holds up the library's."""
    times = {"library": 100.0, "copy_engine:portable": 90.0, "gemm_alone": 60.0, "communication_alone": 50.0}
    runs = iter([({}, 1.0), *[(held_up, clock)] * 100])

    def run(rank: int, world_size: int, job: measure.Job) -> list[Outcome]:
        factors, clock = next(runs)
        subjects = (*job.variants, "gemm_alone", "communication_alone")
        return [Outcome(one, time_us=clock * factors.get(one, 1.0) * times.get(one, 90.0)) for one in subjects]

    job = measure.Job(
        family="all_gather_gemm",
        variants=("library", "copy_engine:portable"),
        shape=Shape(8192, 8192, 8192),
        dtype="bfloat16",
        world_size=2,
        seed=0,
        rounds=1,
        burst=1,
        timed=True,
    )
    config = default_config("sm_90", 132, m=8192, n=4096, dtype=torch.bfloat16)
    with (
        mock.patch.object(measure, "measure", run),
        mock.patch.object(measure, "context"),
        mock.patch.object(candidates, "_default_config", return_value=config),
    ):
        tuned = candidates.tune(0, 2, job)
    assert tuned.tried > 4
    assert tuned.times_us == pytest.approx({"library": 100.0, "copy_engine:portable": 90.0})


def tune_small(rank: int, world_size: int) -> Tuned:
    close_context()
    measure.open_rank(rank, world_size, 8 << 20, "cpu")
    job = measure.Job(
        family="gemm_all_scatter",
        variants=("library", "library_layout", "fused_sequential:portable", "workgroup_specialized:portable"),
        shape=Shape(5, 8, 3),
        dtype="float32",
        world_size=world_size,
        seed=0,
        rounds=1,
        burst=1,
        timed=True,
    )
    tuned = candidates.tune(rank, world_size, job)
    measure.close_rank(rank, world_size)
    return tuned


@pytest.mark.parametrize("device", ["cpu"])
def test_ranks_measure_candidates_and_agree(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(tune_small)
    assert first == second
    assert first.times_us.keys() == {
        "library",
        "library_layout",
        "fused_sequential:portable",
        "workgroup_specialized:portable",
    }
    assert first.tried > 4 + 2 * 3
    assert first.failed == {}


class ScriptedRanks(bench_ranks.Ranks):
    """Ranks that find the same for every problem."""

    is_first = True
    tuned: Tuned | Exception

    def __init__(self, world_size: int, device: str, hosts: int = 1) -> None:
        assert (world_size, device) == (2, "cuda")

    def call(self, fn: Any, *args: Any) -> Any:
        if fn is candidates.tune and isinstance(self.tuned, Exception):
            raise self.tuned
        return {"device_name": GPU} if fn is measure.open_rank else self.tuned

    def close(self, *, kill: bool = False) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[ScriptedRanks]:
    for variable in (*rank_info.TORCHRUN_VARIABLES, *bench_ranks._MPI_VARIABLES, "IRIS_DEVICE", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_ranks, "StartedRanks", ScriptedRanks)
    monkeypatch.setattr(bench_ranks, "count_gpus", lambda: 2)
    return ScriptedRanks


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_the_command_fills_the_cache(scripted: type[ScriptedRanks]) -> None:
    scripted.tuned = Tuned({"library_layout": 50.0, "copy_engine:portable": 40.0}, tried=9)
    result = invoke("tune", "--family", "gemm_all_scatter", "--shapes", "64x64x64,8x8x8")
    assert result.exit_code == 0, result.output
    assert "gemm_all_scatter 8x8x8: copy_engine:portable 40.0 us" in result.stderr
    table = read_cache(GPU)
    assert table.keys() == {Key("gemm_all_scatter", size, size, size, 2, "bfloat16") for size in (8, 64)}
    assert all(measured.times_us == scripted.tuned.times_us for measured in table.values())


def test_fp8_is_tuned_by_kinds_of_scales(scripted: type[ScriptedRanks]) -> None:
    scripted.tuned = Tuned({"library": 50.0, "copy_engine:sm90": 40.0}, tried=9)
    given = ("tune", "--family", "all_gather_gemm", "--shapes", "256x256x256", "--dtype", "fp8")
    assert invoke(*given, "--scales", "block").exit_code == 0
    assert invoke(*given, "--fast-accum").exit_code == 0
    assert {key.dtype for key in read_cache(GPU)} == {"float8_e4m3fn-block", "float8_e4m3fn-row-fast"}
    assert "--scales and --fast-accum are of --dtype fp8" in invoke("tune", "--scales", "row").output


def test_the_command_does_not_measure_what_delegates(
    scripted: type[ScriptedRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(self: ScriptedRanks, fn: Any, *args: Any) -> Any:
        if fn is candidates.tune:
            asked.extend(args[0].variants)
        return {"device_name": GPU} if fn is measure.open_rank else Tuned({"library": 1.0})

    monkeypatch.setattr(ScriptedRanks, "call", note)
    assert invoke("tune", "--shapes", "8x8x8").exit_code == 0
    assert "auto" not in asked
    assert {"library", "library_layout", "warp_specialized:sm90"} <= set(asked)


@pytest.mark.parametrize("family", list_families())
def test_a_family_is_tuned_with_its_own_variants(
    scripted: type[ScriptedRanks], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    scripted.tuned = Tuned({"library": 1.0})
    result = invoke("tune", "--family", family, "--shapes", "64x64x64")
    assert result.exit_code == 0, result.output


def test_what_was_tuned_before_the_ranks_were_lost_is_kept(scripted: type[ScriptedRanks]) -> None:
    scripted.tuned = Tuned({"library_layout": 50.0})
    invoke("tune", "--family", "gemm_all_scatter", "--shapes", "8x8x8")
    scripted.tuned = TimeoutError("rank 1: waited in vain")
    result = invoke("tune", "--family", "gemm_all_scatter", "--shapes", "64x64x64")
    assert result.exit_code == 1
    assert "ended early: TimeoutError: rank 1: waited in vain" in result.stderr
    assert len(read_cache(GPU)) == 1


def test_interpreted_kernels_are_not_tuned(scripted: type[ScriptedRanks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ranks, "count_gpus", lambda: 0)
    result = invoke("tune")
    assert result.exit_code == 2
    assert "tuning needs GPUs" in result.stderr


def test_a_cache_that_cannot_be_kept_is_refused_before_anything_is_measured(
    scripted: type[ScriptedRanks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "file"))
    result = invoke("tune")
    assert result.exit_code == 2
    assert "IRIS_CACHE_DIR names another folder" in result.stderr
