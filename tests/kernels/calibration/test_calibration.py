"""A machine's constants, measured on all ranks together, and their file: what fails, and what is used of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any
from unittest import mock

import pytest
import torch
from calibrations import ASSUMED, CONSTANTS, FACTS, NEW, OF_BYTES, TRUE, as_if_on
from families import make_problem
from ranks import Ranks, context

from iris_kernels.common import calibration
from iris_kernels.common.calibration import calibrate
from iris_kernels.common.calibration.calibrate import Calibration
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
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import Key, Measured
from iris_kernels.common.choice.ranking import Ranking
from overlap_taxonomy import MACHINES, assumed_machine

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
    assert {name: machine.constant(name) for name in CONSTANTS} == {
        name: machine_in(text).constant(name) for name in CONSTANTS
    }
    assert machine.link_gbps != ASSUMED.link_gbps
    assert (machine.num_sms, machine.is_measured) == (160, True)
    assert read_calibration(NEW, 4) is None  # other files


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_calibration_of_the_machine_that_was_fitted_gives_what_was_fitted(world_size: int) -> None:
    text, fitted = reference(world_size), MACHINES[f"h200x{world_size}"]
    measured = json.loads(text)["constants"]
    machine = machine_in(text, is_of_here=False)
    assert {"link_gbps", "launch_us", "boost_tflops"} <= set(measured)
    for name, value in measured.items():
        assert machine.constant(name) == pytest.approx(fitted.constant(name))
        assert value != pytest.approx(fitted.constant(name), rel=1e-4)


@pytest.mark.parametrize(("world_size", "of"), [(1, 2), (2, 2), (4, 4), (8, 4)])
def test_a_constant_counts_by_what_the_nearest_fitted_machine_measures(world_size: int, of: int) -> None:
    facts, there = FACTS | {"world_size": world_size}, json.loads(reference(of))["constants"]
    machine = machine_in(to_text(facts, {name: 2 * value for name, value in there.items()} | {"signal_us": 9.0}))
    fitted, assumed = MACHINES[f"h200x{of}"], assumed_machine(**facts)
    for name, measured in there.items():
        known = fitted.constant(name)
        assert machine.constant(name) == pytest.approx(known + measured if name.endswith("_us") else 2 * known)
    assert machine.signal_us == assumed.signal_us  # measured on no machine that was fitted


def test_a_time_that_is_shorter_by_more_than_was_fitted_is_a_quarter_of_that() -> None:
    machine = machine_in(to_text(FACTS, {"launch_us": 1e-3}))
    assert machine.launch_us == pytest.approx(MACHINES["h200x2"].launch_us / 4)


def test_of_amd_gpus_constants_are_as_they_were_measured() -> None:
    machine = machine_in(to_text(FACTS | {"is_amd": True}, CONSTANTS))
    assert {name: machine.constant(name) for name in CONSTANTS} == CONSTANTS


def reference(world_size: int) -> str:
    file = resources.files(calibration).joinpath(f"reference-h200x{world_size}.json")
    return file.read_text(encoding="utf-8")


def test_other_versions_have_other_files() -> None:
    write_calibration(NEW, 2, to_text(FACTS, CONSTANTS))
    with mock.patch("iris_kernels.common.calibration.kept.driver", return_value="999.1"):
        assert read_calibration(NEW, 2) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": 1}, "format 1, this is 2"),
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
    assert first.constants.keys() > {"launch_us", "link_gbps"}, first.left
    assert len(first.constants) > len(first.left), first.left  # beside other work some times are beyond the model
    assert first.seconds < calibrate.LIMIT_S + 20  # a step that has begun goes on
