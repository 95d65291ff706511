"""What measured problems say of others, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from families import make_problem
from torch._subclasses.fake_tensor import FakeTensorMode

from iris_kernels.common.choice import corrections
from iris_kernels.common.choice.corrections import NOISE, SPREAD, Estimate, distance, is_narrow
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import Key, Measured, Table, key_of, work_of
from iris_kernels.common.choice.ranking import Ranking
from iris_kernels.common.config import GemmConfig
from overlap_taxonomy import MACHINES, Choice, Work, list_families, list_variants, machine_for, predict_us

GPU, SIBLING = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
MACHINE = MACHINES["h200x4"]
FAMILY = "all_gather_gemm"
WORK = Work(FAMILY, 300, 14336, 4096, 4)
OURS = "copy_engine:portable"


def key(**changed: int | str) -> Key:
    return Key(**{"family": FAMILY, "m": 300, "n": 14336, "k": 4096, "world_size": 4, "dtype": "bfloat16"} | changed)


def known(*, library: float = 1.5, ours: float = 3.0, gpu: str = GPU, **changed: int | str) -> Table:
    """A problem whose times are so many times what the model says."""
    of = key(**changed)
    work, machine = work_of(of), machine_for(gpu, of.world_size)
    assert machine
    times = {name: us * (predict_us(machine, name, work) or 0) for name, us in (("library", library), (OURS, ours))}
    return {of: Measured({name: us for name, us in times.items() if us})}


def estimates(tables: dict[str, Table], work: Work = WORK) -> dict[str, Estimate]:
    of_evidence = Knowledge(GPU, {}, tables).corrections(work, "library")
    return of_evidence.estimate(MACHINE, [work], [OURS, "kraken"]).of(0)


def off(tables: dict[str, Table], work: Work = WORK) -> dict[str, float]:
    """How many times what the model says is estimated."""
    return {name: one.us / (predict_us(MACHINE, name, work) or 0) for name, one in estimates(tables, work).items()}


def doubt(tables: dict[str, Table]) -> float:
    return estimates(tables)[OURS].doubt


def test_without_any_it_is_the_models() -> None:
    assert off({}) == pytest.approx({"library": 1.0, OURS: 1.0})  # and kraken is not modelled
    assert doubt({}) == SPREAD


def test_one_just_like_it_corrects_all_and_leaves_the_noise() -> None:
    assert off({GPU: known()}) == pytest.approx({"library": 1.5, OURS: 3.0}, rel=0.04)
    assert doubt({GPU: known()}) == pytest.approx(math.sqrt(2) * NOISE, rel=0.01)


def test_a_compilers_fake_tensors_are_none_of_theirs() -> None:
    with FakeTensorMode():
        among_fakes = off({GPU: known()})
    assert among_fakes == off({GPU: known()})


@pytest.mark.parametrize("size", ["m", "n", "k"])
def test_the_further_one_is_the_less_it_corrects_and_the_more_doubt_is_left(size: str) -> None:
    start = {"m": 300, "n": 14336, "k": 4096}[size]
    found = [{GPU: known(**{size: factor * start})} for factor in (1, 2, 4, 64)]
    corrected = [off(tables)[OURS] for tables in found]
    assert sorted(corrected, reverse=True) == corrected
    assert corrected[0] > 1.1 * corrected[-1] > 1.1
    doubts = [doubt(tables) for tables in found]
    assert sorted(doubts) == doubts
    assert doubts[0] < SPREAD / 2 < doubts[-1] < 1.01 * SPREAD


def test_what_is_off_for_both_is_no_doubt_about_which_is_faster() -> None:
    """Errors that the two have in common, such as a GPU's that is cool, are those of the library's time alone."""
    both = estimates({GPU: known(library=2.0, ours=2.0)})[OURS]
    predicted = [predict_us(MACHINE, name, WORK) or 0 for name in ("library", OURS)]
    assert both.log_ratio == pytest.approx(math.log(predicted[1] / predicted[0]), abs=1e-6)


def test_other_ranks_and_gpus_of_the_chip_say_less() -> None:
    here, sibling = {GPU: known()}, {SIBLING: known(gpu=SIBLING)}
    other_ranks = {GPU: known(world_size=2, n=7168)}  # as much a rank
    assert doubt(here) < doubt(sibling) < doubt(other_ranks) < SPREAD
    assert 1.0 < off(other_ranks)[OURS] < off(sibling)[OURS] < off(here)[OURS]
    one = Knowledge(SIBLING, {}, sibling).evidence()[0]
    assert distance(SIBLING, WORK, one) == 0.0 < distance(GPU, WORK, one)


def test_the_users_times_replace_those_that_are_shipped() -> None:
    both = Knowledge(GPU, known(ours=4.0), {GPU: known()})
    assert [math.exp(one.off[OURS]) for one in both.evidence()] == pytest.approx([4.0])


@pytest.mark.parametrize(
    "changed", [{"dtype": "float32"}, {"dtype": "float8_e4m3fn-row"}, {"family": "gemm_all_scatter"}]
)
def test_what_is_not_like_it_does_not_count(changed: dict[str, str]) -> None:
    assert off({GPU: known(**changed)}) == pytest.approx({"library": 1.0, OURS: 1.0})


def test_sums_of_fp8_are_kept_apart_and_scales_of_tensors_and_rows_are_alike() -> None:
    works = {name: work_of(key(dtype=f"float8_e4m3fn-{name}")) for name in ("row", "tensor", "row-fast", "block")}
    table = {GPU: known(dtype="float8_e4m3fn-row")}
    found = {name: off(table, work)[OURS] for name, work in works.items()}
    assert found == pytest.approx({"row": 3.0, "tensor": 3.0, "row-fast": 1.0, "block": 1.0}, rel=0.04)


def test_types_of_two_bytes_are_alike() -> None:
    assert off({GPU: known(dtype="float16")}) == off({GPU: known()})


def test_nor_do_rows_that_are_not_on_16_bytes() -> None:
    assert off({GPU: known(k=4095)}) == pytest.approx({"library": 1.0, OURS: 1.0})


def test_a_variant_that_was_not_measured_there_stays_in_its_place_beside_the_library() -> None:
    tables = {GPU: known(ours=0.0)}
    assert off(tables) == pytest.approx({"library": 1.5, OURS: 1.5}, rel=0.02)
    assert doubt(tables) == SPREAD


def test_a_variant_is_corrected_by_problems_where_it_was_measured_as_if_there_were_no_others() -> None:
    tables = {GPU: known(m=64) | known(m=512, ours=0.0) | known(n=8192, ours=2.0) | known(k=8192, ours=0.0)}
    both = [one for one in Knowledge(GPU, {}, tables).evidence() if OURS in one.off]
    near = SPREAD**2 * np.exp([-distance(GPU, WORK, one) for one in both])
    apart = np.array([[distance(GPU, one.work, other) for other in both] for one in both])
    solved = np.linalg.solve(SPREAD**2 * np.exp(-apart) + NOISE**2 * np.eye(len(both)), near)
    found, nothing = estimates(tables)[OURS], estimates({})[OURS]
    assert len(both) == 2
    assert found.doubt == pytest.approx(math.sqrt(SPREAD**2 - solved @ near + NOISE**2))
    expected = sum(weight * (one.off[OURS] - one.off["library"]) for weight, one in zip(solved, both, strict=True))
    assert found.log_ratio - nothing.log_ratio == pytest.approx(expected)


@pytest.mark.parametrize(
    ("work", "narrow"),
    [
        (Work(FAMILY, 1, 4096, 4096, 4), False),
        (Work(FAMILY, 1, 4097, 4096, 4), True),
        (Work(FAMILY, 1, 4096, 4097, 4), True),
        (Work("gemm_reduce_scatter", 1, 4096, 4096, 4), False),
        (Work("gemm_reduce_scatter", 1, 4096, 4100, 4), True),  # 1025 a rank
        (Work(FAMILY, 1, 4096, 4100, 4), True),
    ],
)
def test_rows_on_16_bytes(work: Work, narrow: bool) -> None:
    assert is_narrow(work) == narrow


def test_times_of_other_configurations_than_the_default_do_not_count() -> None:
    ((key, measured),) = known().items()
    tuned = {key: replace(measured, configs={OURS: GemmConfig(128, 128, 64, num_stages=4)})}
    assert off({GPU: tuned}) == pytest.approx({"library": 1.5, OURS: 1.5}, rel=0.02)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("family", list_families())
def test_fp32_is_left_to_the_library_unless_problems_like_it_were_measured(family: str, world_size: int) -> None:
    ours = [variant.name for variant in list_variants(family) if variant.has_kernels]
    for m in (1, 512, 8192):
        problem = make_problem(family, m, 8192, 8192, world_size, torch.float32)
        times = dict.fromkeys(["library", *ours], 1e3) | {"fused_sequential:portable:stream_k": 10.0}
        like = {key_of(family, make_problem(family, m, 8192, 8064, world_size, torch.float32)): Measured(times)}
        for table, choice in (
            ({}, Choice("library", None, "nothing like it was measured in fp32")),
            (like, Choice("fused_sequential:portable:stream_k", None, "predicted by problems like it")),
        ):
            assert Ranking(Knowledge(GPU, table, {}), family, problem, ["library", *ours]).of(m) == choice


def test_of_fp32_no_variant_multiplies_faster_than_its_gemm() -> None:
    machine, stream_k = MACHINES["h200x2"], "fused_sequential:portable:stream_k"
    for m in (2048, 8192):
        us = predict_us(machine, stream_k, Work("gemm_all_reduce", m, 8192, 8192, 1, 4))
        assert us
        assert 2.0 * m * 8192 * 8192 / us < machine.fp32_tflops * 1e6


def measured_often(times: dict[str, float], problems: int = 50, **changed: int) -> Table:
    """So many problems with these times each."""
    return {key(n=8 * (number + 1), **changed): Measured(times) for number in range(problems)}


THREE = {"library": 100.0, OURS: 90.0, "copy_engine:sm90": 80.0}


@pytest.mark.parametrize(
    ("table", "left"),
    [
        (measured_often(THREE), ["library", "copy_engine:sm90"]),
        (measured_often(THREE, problems=49), [*THREE]),
        (measured_often(THREE, world_size=2), [*THREE]),
        (measured_often(THREE) | {key(m=1): Measured({**THREE, OURS: 77.0})}, [*THREE]),
        (measured_often(THREE) | {key(m=1): Measured({**THREE, OURS: 79.0})}, ["library", "copy_engine:sm90"]),
        (measured_often({**THREE, "library": 70.0}), ["library"]),
        (measured_often({"library": 100.0, OURS: 90.0}), ["library", OURS, "copy_engine:sm90"]),
    ],
    ids=["never", "too few", "other ranks", "once by much", "once by little", "the library", "not measured"],
)
def test_what_was_measured_often_and_never_was_the_fastest_is_no_contender(table: Table, left: list[str]) -> None:
    of_evidence = Knowledge(GPU, {}, {GPU: table}).corrections(WORK, "library")
    assert of_evidence.contenders(4, [*THREE]) == left


def test_auto_takes_no_variant_that_is_no_contender_though_the_model_would() -> None:
    problem, names = make_problem(FAMILY, 300, 14336, 4096, 4, torch.bfloat16), [*THREE]
    fastest = {"library": 100.0, OURS: 10.0, "copy_engine:sm90": 80.0}
    with mock.patch.object(corrections, "predict_us", lambda machine, name, work: fastest[name]):
        for table, taken in (({}, OURS), (measured_often(THREE), "copy_engine:sm90")):
            found = Ranking(Knowledge(GPU, {}, {GPU: table}), FAMILY, problem, names, is_here=False)
            assert found.of(300).variant == taken
            assert set(found.estimates(300)) == set(names)
        instead = Ranking(
            Knowledge(GPU, {}, {GPU: measured_often(THREE)}), FAMILY, problem, names, is_here=False, instead=OURS
        )
        assert instead.contenders == names
