"""A machine's constants, measured on all ranks together: what fails, what is kept, and when it happens by itself."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from families import make_problem
from ranks import Ranks, close_context, context
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.command import ranks as bench_ranks
from iris_bench.tune import calibrate_cli
from iris_core import Context
from iris_kernels.common.calibration import calibrate, first_use
from iris_kernels.common.calibration.calibrate import Calibration, facts_of
from iris_kernels.common.calibration.first_use import spread_reason
from iris_kernels.common.calibration.kept import (
    calibration_path,
    kept_machine,
    machine_in,
    read_calibration,
    to_text,
    write_calibration,
)
from iris_kernels.common.calibration.links import BLOCK, MOVES, move_kernel
from iris_kernels.common.calibration.steps import STEPS, Sample, Setting, Step
from iris_kernels.common.choice import auto
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import Key, Measured
from iris_kernels.common.choice.ranking import Ranking
from overlap_taxonomy import MACHINES, assumed_machine

NEW = "NVIDIA B999"  # of which nothing is known
FACTS = {"gpu": NEW, "world_size": 2, "num_sms": 160, "l2_bytes": 1 << 20, "is_amd": False, "is_hopper": False}
ASSUMED = assumed_machine(**FACTS)
CONSTANTS = {"link_gbps": 500.0, "stream_k.memory_gbps": 6000.0, "tile_rates.128x128": 0.9}
OF_BYTES = tuple(step for step in STEPS if step.name in ("links", "the library's collectives"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Constants and files ---------------------------------------------------------------------------------------------


def test_an_unknown_gpu_is_assumed_to_be_like_the_nearest_with_its_own_counts() -> None:
    assert (ASSUMED.num_sms, ASSUMED.l2_bytes, ASSUMED.world_size, ASSUMED.gpu) == (160, 1 << 20, 2, NEW)
    assert ASSUMED.link_gbps == MACHINES["h200x2"].link_gbps
    assert not ASSUMED.is_hopper
    assert assumed_machine(**FACTS | {"gpu": "NVIDIA H200"}) is MACHINES["h200x2"]
    assert assumed_machine(**FACTS | {"is_amd": True}).tile_rates == MACHINES["mi300xx8"].tile_rates


def test_constants_have_names() -> None:
    machine = ASSUMED.with_constants(CONSTANTS)
    assert {name: machine.constant(name) for name in CONSTANTS} == CONSTANTS
    assert (machine.link_gbps, machine.stream_k.memory_gbps) == (500.0, 6000.0)
    assert machine.tile_rates == {**ASSUMED.tile_rates, (128, 128): 0.9}
    for name in ("speed", "stream_k.speed", "tile_rates.8x8", "tile_rates.x", "name", "stream_k", "link_gbps.x"):
        with pytest.raises(ValueError, match="unknown constant"):
            ASSUMED.with_constants({name: 1.0})


def test_what_is_kept_is_found_again() -> None:
    assert read_calibration(NEW, 2) is None
    text = to_text(FACTS, CONSTANTS)
    path = write_calibration(NEW, 2, text)
    assert path == calibration_path(NEW, 2)
    assert path.stat().st_mode & 0o777 == 0o600
    machine = kept_machine(NEW, 2)
    assert machine
    assert {name: machine.constant(name) for name in CONSTANTS} == CONSTANTS
    assert (machine.num_sms, machine.is_measured) == (160, True)
    assert read_calibration(NEW, 4) is None  # other files


def test_other_versions_have_other_files() -> None:
    write_calibration(NEW, 2, to_text(FACTS, CONSTANTS))
    with mock.patch("iris_kernels.common.calibration.kept.driver", return_value="999.1"):
        assert read_calibration(NEW, 2) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": 2}, "format 2, this is 1"),
        ({"torch": "0.1"}, "torch '0.1'"),
        ({"driver": "0.1"}, "driver '0.1'"),
        ({"constants": []}, "no constants"),
        ({"constants": {"speed": 1.0}}, "unknown constant 'speed'"),
        ({"constants": {"link_gbps": -1.0}}, "link_gbps is -1.0"),
        ({"constants": {"link_gbps": "much"}}, "link_gbps is 'much'"),
        ({"num_sms": True}, "num_sms is True"),
        ({"world_size": 4}, "it is of 4 x NVIDIA B999"),
        ({"gpu": "NVIDIA H200"}, "it is of 2 x H200"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(changed: dict[str, Any], said: str) -> None:
    path = write_calibration(NEW, 2, json.dumps(json.loads(to_text(FACTS, CONSTANTS)) | changed))
    with pytest.warns(UserWarning, match="is not used.*calibrate` replaces it") as warned:
        assert kept_machine(NEW, 2) is None
    assert said in str(warned[0].message)
    assert str(path) in str(warned[0].message)


def test_a_file_that_is_cut_or_that_others_can_write_is_not_used() -> None:
    path = write_calibration(NEW, 2, to_text(FACTS, CONSTANTS)[:40])
    with pytest.warns(UserWarning, match="not JSON"):
        assert kept_machine(NEW, 2) is None
    write_calibration(NEW, 2, to_text(FACTS, CONSTANTS))
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="others may write"):
        assert kept_machine(NEW, 2) is None


def test_what_was_measured_here_counts_before_what_is_shipped() -> None:
    slow = MACHINES["h200x2"].with_constants({"link_gbps": 50.0})
    times = Measured({"library": 100.0})
    shipped = {"NVIDIA H200": {Key("all_gather_gemm", 64, 4096, 4096, size, "bfloat16"): times for size in (2, 4)}}
    known = Knowledge("NVIDIA H200", {}, shipped, slow)
    assert known.machine(2) is slow
    assert known.machine(4) is MACHINES["h200x4"]
    assert [one.machine for one in known.evidence()] == [slow, MACHINES["h200x4"]]


def test_an_unknown_gpu_has_choices_once_it_was_measured() -> None:
    problem = make_problem("gemm_all_scatter", 8192, 8192, 8192, 2, torch.bfloat16)
    candidates = ["library_layout", "copy_engine:portable", "fused_sequential:portable"]
    whys = []
    for machine in (None, ASSUMED.with_constants({"collective_gbps": 20.0})):
        whys.append(Ranking(Knowledge(NEW, {}, {}, machine), "gemm_all_scatter", problem, candidates).of(8192))
    assert (whys[0].variant, whys[0].why) == ("library_layout", "neither measured nor modelled")
    assert (whys[1].variant != "library_layout", whys[1].why) == (True, "predicted")


# On all ranks ----------------------------------------------------------------------------------------------------


def run_small(rank: int, world_size: int) -> Calibration:
    """Every step as it is, by interpreted kernels: none of their times can be a GPU's."""
    result = calibrate.calibrate(context())
    context().barrier()
    return result


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_step_runs(ranks: Callable[[int], Ranks], world_size: int) -> None:
    found = ranks(world_size).call(run_small)
    assert all((one.constants, one.left) == (found[0].constants, found[0].left) for one in found)
    others = {line.partition(":")[0] for line in found[0].left if "were measured" not in line}
    assert others == {"the main loop for Hopper"}
    constants = {line.partition(":")[0] for line in found[0].left} - others | found[0].constants.keys()
    assert constants >= {"launch_us", "boost_tflops", "portable_rate", "tile_rates.128x128"}
    assert (constants >= {"link_gbps", "hop_us", "collective_gbps", "handshake_us"}) == (world_size > 1)


def store_to_all(rank: int, world_size: int, programs: int) -> bool:
    """Store to all peers at once; return whether all that all sent is here."""
    ctx = context()
    received, sent = (ctx.zeros(size, dtype=torch.int32) for size in ((world_size, 3 * BLOCK), 3 * BLOCK))
    sent.copy_(torch.arange(3 * BLOCK) + 1000 * rank)
    ctx.barrier()
    words = (3 * BLOCK, rank, (rank + 1) % world_size, ctx.get_heap_bases())
    options = {"KIND": MOVES.index("store"), "BLOCK": BLOCK, "PEERS": world_size - 1}
    move_kernel[(programs,)](sent, received[rank], *words, **options)
    ctx.barrier()
    peers = [peer for peer in range(world_size) if peer != rank]
    is_right = all(torch.equal(received[peer], torch.arange(3 * BLOCK).int() + 1000 * peer) for peer in peers)
    ctx.barrier()
    ctx.free(received)
    ctx.free(sent)
    return is_right


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("programs", [2, 4, 8])
def test_a_kernel_stores_to_all_peers_at_once(ranks: Callable[[int], Ranks], programs: int) -> None:
    assert ranks(3).call(store_to_all, programs) == [True] * 3


TRUE = assumed_machine(**FACTS | {"gpu": "NVIDIA H200"}).with_constants(
    {"link_gbps": 111.0, "engine_us": 20.0, "collective_gbps": 77.0, "small_collective_us": 11.0}
)


def as_if_on(machine: Any) -> Any:
    """Have each call take as long as it does on a machine, by the model; it is called all the same."""

    def times_us(ctx: Context, samples: Sequence[Sample]) -> list[float]:
        for sample in samples:
            sample.call()
        ctx.barrier()
        return [sample.predict(machine) for sample in samples]

    return mock.patch.object(calibrate, "_times_us", times_us)


def measure_true(rank: int, world_size: int) -> Calibration:
    with as_if_on(TRUE):
        return calibrate.calibrate(context(), steps=OF_BYTES)


@pytest.mark.parametrize("device", ["cpu"])
def test_what_is_measured_is_found_and_the_rest_stays(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(measure_true)
    assert first.constants == second.constants
    assert first.left == []
    for name in ("link_gbps", "engine_us", "collective_gbps", "small_collective_us"):
        assert first.machine.constant(name) == pytest.approx(TRUE.constant(name), rel=0.01)
    assert first.machine.boost_tflops == first.assumed.boost_tflops


def fail(rank: int, world_size: int, whose: Sequence[int], kind: str) -> tuple[Calibration, str]:
    """A step fails on some ranks, between two that do not; afterwards the context is as good as before."""

    def prepare(setting: Setting) -> list[Sample]:
        if rank in whose:
            raise {"ValueError": ValueError, "TimeoutError": TimeoutError}[kind]("no such\nluck")
        return []

    with as_if_on(TRUE):
        steps = (OF_BYTES[0], Step("what fails", prepare), OF_BYTES[1])
        result = calibrate.calibrate(context(), steps=steps)
    return result, str(context().broadcast("all is well", 0))


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("whose", [[0, 1], [1]])
def test_a_step_that_fails_leaves_its_constants_and_a_line(ranks: Callable[[int], Ranks], whose: list[int]) -> None:
    for result, word in ranks(2).call(fail, whose, "ValueError"):
        assert result.left == ["what fails: ValueError: no such luck"]
        assert result.constants.keys() > {"link_gbps", "collective_gbps"}
        assert word == "all is well"


@pytest.mark.parametrize("device", ["cpu"])
def test_after_ranks_have_lost_each_other_what_came_before_counts(ranks: Callable[[int], Ranks]) -> None:
    for result, word in ranks(2).call(fail, [0, 1], "TimeoutError"):
        assert result.left == ["what followed: TimeoutError: no such luck"]
        assert "link_gbps" in result.constants
        assert "collective_gbps" not in result.constants
        assert word == "all is well"


def run_late(rank: int, world_size: int) -> Calibration:
    return calibrate.calibrate(context(), limit_s=0.0)


@pytest.mark.parametrize("device", ["cpu"])
def test_no_step_begins_after_the_limit(ranks: Callable[[int], Ranks]) -> None:
    for result in ranks(2).call(run_late):
        assert result.left == [f"{step.name}: there was no time left" for step in STEPS]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_on_gpus_nearly_all_is_measured(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(run_small)
    assert first.constants == second.constants
    assert len(first.constants) >= 20, first.left
    assert first.seconds < calibrate.LIMIT_S + 20  # a step that has begun goes on


# By itself -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_a_new_gpu(folder: str, reason: str | None = "") -> Iterator[mock.MagicMock]:
    """On GPUs of which nothing is known, with a cache in a folder; `reason` not to measure, None for the real one."""
    facts = {**FACTS, "world_size": context().get_num_ranks()}
    said = mock.MagicMock()
    with contextlib.ExitStack() as changed:
        for patch in (
            mock.patch.dict(os.environ, {"IRIS_CACHE_DIR": folder}),
            mock.patch.object(auto, "device_name", return_value=NEW),
            mock.patch.object(first_use, "facts_of", return_value=facts),
            mock.patch.object(first_use, "_busy_reason", return_value=""),
            mock.patch.object(calibrate, "STEPS", OF_BYTES),
            mock.patch.object(first_use, "calibrate", lambda ctx: calibrate.calibrate(ctx, steps=OF_BYTES)),
            mock.patch.object(Context, "info", said),
            as_if_on(TRUE),
        ):
            changed.enter_context(patch)
        if reason is not None:
            changed.enter_context(mock.patch.object(first_use, "_reason_not_to", return_value=reason))
        yield said


def know(
    rank: int, world_size: int, folders: Sequence[str], reasons: Sequence[str]
) -> tuple[Any, list[str], list[str]]:
    """Return a constant as it is known, what was said, and the files there are then."""
    with warnings.catch_warnings(record=True) as warned, on_a_new_gpu(folders[rank], reasons[rank]) as said:
        warnings.simplefilter("always")
        known = auto.known_of(context())
        link = known.calibrated.link_gbps if known.calibrated else None
        lines = [call.args[-1] for call in said.call_args_list]
        there = sorted(file.name for file in Path(folders[rank]).glob("calibration*"))
    close_context()
    return link, lines + [str(one.message) for one in warned if "calibration" in str(one.message)], there


@pytest.mark.parametrize("device", ["cpu"])
def test_an_unknown_machine_is_measured_once(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Rank 0 keeps it: the other rank's cache stays empty."""
    asked = [[str(tmp_path / "first"), str(tmp_path / "second")], ["", ""]]
    (link, lines, there), (other, silence, empty) = ranks(2).call(know, *asked)
    assert link == other == pytest.approx(TRUE.link_gbps, rel=0.01)
    assert len(there) == 1
    assert empty == silence == []
    assert "once, for 15 to 60 s; IRIS_CALIBRATE=0 turns that off" in lines[0]
    assert f"kept in {tmp_path / 'first' / there[0]}" in lines[1]
    again = ranks(2).call(know, *asked)
    assert [link for link, *_ in again] == [link, link]
    assert [lines for _, lines, _ in again] == [[], []]


def keep_first(rank: int, world_size: int, folders: Sequence[str]) -> None:
    """Keep another calibration on each rank."""
    with on_a_new_gpu(folders[rank]):
        write_calibration(NEW, world_size, to_text(FACTS, {"link_gbps": [300.0, 400.0][rank]}))
    close_context()


@pytest.mark.parametrize("device", ["cpu"])
def test_of_ranks_with_different_files_that_of_rank_0_counts(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    ranks(2).call(keep_first, folders)
    assert [link for link, *_ in ranks(2).call(know, folders, ["", ""])] == [300.0, 300.0]


@pytest.mark.parametrize("device", ["cpu"])
def test_instead_of_a_file_that_cannot_be_used_it_is_measured_again(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    ranks(2).call(keep_first, folders)
    (file,) = (tmp_path / "first").glob("calibration*")
    file.write_text("{")
    (link, lines, _), (other, *_) = ranks(2).call(know, folders, ["", ""])
    assert link == other == pytest.approx(TRUE.link_gbps, rel=0.01)
    assert any("is not used: it is not JSON" in line for line in lines)
    json.loads(file.read_text())


def know_for_real(rank: int, world_size: int, folder: str) -> tuple[Any, list[str]]:
    """Take the GPUs for others, of which nothing is known."""
    facts = facts_of(context()) | {"gpu": NEW}
    with (
        mock.patch.dict(os.environ, {"IRIS_CACHE_DIR": folder}),
        mock.patch.object(auto, "device_name", return_value=NEW),
        mock.patch.object(first_use, "facts_of", return_value=facts),
        mock.patch.object(Context, "info") as said,
    ):
        known = auto.known_of(context())
    close_context()
    return known.calibrated, [call.args[-1] for call in said.call_args_list]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_unknown_gpus_are_measured_by_themselves(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    (machine, lines), (other, silence) = ranks(2).call(know_for_real, str(tmp_path / "cache"))
    assert machine is not None, lines
    assert machine.link_gbps == other.link_gbps
    assert silence == []
    assert "kept in" in lines[-1]


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("reasons", [["no time", ""], ["", "no time"]])
def test_where_one_rank_cannot_none_measures(ranks: Callable[[int], Ranks], tmp_path: Path, reasons: list[str]) -> None:
    (link, lines, there), (other, *_) = ranks(2).call(know, [str(tmp_path / "a"), str(tmp_path / "b")], reasons)
    assert link is None
    assert other is None
    assert there == []
    assert lines == [f"the cost model does not know {NEW}, and it is not measured now: no time"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"switch": "0"}, "IRIS_CALIBRATE is 0"),
        ({"switch": "off"}, "IRIS_CALIBRATE is off"),
        ({"switch": "1"}, ""),
        ({"is_interpreted": True}, "kernels are interpreted"),
        ({"is_capturing": True}, "a stream is being captured"),
        ({"is_compiling": True}, "a graph is being compiled"),
        ({"busy": "the GPU is busy"}, "the GPU is busy"),
    ],
)
def test_when_nothing_is_measured(changed: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IRIS_CALIBRATE", raising=False)
    if "switch" in changed:
        monkeypatch.setenv("IRIS_CALIBRATE", changed["switch"])
    ctx = mock.MagicMock()
    ctx.is_interpreted.return_value = changed.get("is_interpreted", False)
    ctx.backend.is_capturing.return_value = changed.get("is_capturing", False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: changed.get("is_compiling", False))
    monkeypatch.setattr(first_use, "_busy_reason", lambda ctx: changed.get("busy", ""))
    assert first_use._reason_not_to(ctx) == reason


def test_a_switch_that_makes_no_sense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_CALIBRATE", "maybe")
    with pytest.raises(ValueError, match="IRIS_CALIBRATE is 'maybe'"):
        first_use._reason_not_to(mock.MagicMock())


def test_what_is_shipped_comes_first() -> None:
    ctx = mock.MagicMock()
    ctx.get_num_ranks.return_value = 2
    assert first_use.measured_at_first_use(ctx, "NVIDIA H100 80GB HBM3") is None
    assert not ctx.control_plane.all_gather.called


def test_what_was_kept_counts_where_nothing_is_shipped(cache: Path) -> None:
    for gpu in (NEW, "NVIDIA H200"):
        write_calibration(gpu, 2, to_text({**FACTS, "gpu": gpu}, {"link_gbps": 500.0}))
    assert auto._calibration_of(NEW, 2) == read_calibration(NEW, 2) is not None
    assert auto._calibration_of("NVIDIA H200", 2) is None


def test_others_on_the_gpu_are_told_by_how_times_spread() -> None:
    alone = [100.0 + index % 7 for index in range(150)]
    assert spread_reason(alone) == ""
    assert spread_reason([*alone[:-2], 2000.0, 3000.0]) == ""  # now and then something is late
    in_turns = [us if index % 8 else 2000.0 for index, us in enumerate(alone)]
    assert "the GPU is busy: a tenth of one GEMM's runs take 19" in spread_reason(in_turns)


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_runs_on_a_cpu_and_keeps_nothing(cache: Path) -> None:
    result = CliRunner().invoke(cli.app, ["calibrate", "--device", "cpu", "--world-size", "2"])
    assert result.exit_code == 0, result.output
    assert "as before: the main loop for Hopper: ValueError" in result.stdout
    assert "nothing is kept" in result.stdout
    assert not list(cache.glob("*"))


class FakeRanks:
    is_first = True

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return (self.calibration, FACTS) if fn is calibrate_cli._measure else None

    def close(self, *, kill: bool = False) -> None:
        pass


@pytest.mark.parametrize("constants", [CONSTANTS, {}])
def test_the_command_shows_and_keeps_what_was_measured(
    constants: dict[str, float], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ranks, "count_gpus", lambda: 2)
    ranks = FakeRanks(Calibration(ASSUMED, constants, ["hop_us: no such luck"], 12.0))
    monkeypatch.setattr(calibrate_cli, "start_ranks", lambda *_: ranks)
    result = CliRunner().invoke(cli.app, ["calibrate", "--device", "cuda"])
    assert result.exit_code == (0 if constants else 1), result.output
    assert "2 x NVIDIA B999, 12 s" in result.stdout
    assert "as before: hop_us: no such luck" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["link_gbps", f"{ASSUMED.link_gbps:.4g}", "500"] in rows or not constants
    machine = kept_machine(NEW, 2)
    assert (machine is not None) == bool(constants)
    assert machine is None or machine_in(read_calibration(NEW, 2) or "").link_gbps == 500.0
