"""What is known of a problem by problems like it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from families import make_problem

from iris_kernels.common.choice import neighbours
from iris_kernels.common.choice.auto import choose
from iris_kernels.common.choice.measured import Key, Measured, key_of
from iris_kernels.common.choice.neighbours import estimate, is_narrow
from iris_kernels.common.config import GemmConfig
from overlap_taxonomy import MACHINES, Choice, Work, list_families, list_variants, predict_us

MACHINE = MACHINES["h200x4"]
FAMILY = "all_gather_gemm"
WORK = Work(FAMILY, 300, 14336, 4096, 4)
NAMES = ["library", "copy_engine:portable"]


def known(
    *, factor: float = 2.0, names: tuple[str, ...] = ("library", "copy_engine:portable"), **changed: int | str
) -> dict[Key, Measured]:
    """A problem that took so many times what the model says."""
    key = Key(**{"family": FAMILY, "m": 300, "n": 14336, "k": 4096, "world_size": 4, "dtype": "bfloat16"} | changed)
    work = Work(key.family, key.m, key.n, key.k, key.world_size)
    return {key: Measured({name: factor * (predict_us(MACHINE, name, work) or math.nan) for name in names})}


def factors(table: dict[Key, Measured]) -> dict[str, float]:
    """How many times what the model says is estimated."""
    estimates = estimate(MACHINE, WORK, NAMES, table)
    return {name: one.us / (predict_us(MACHINE, name, WORK) or math.nan) for name, one in estimates.items()}


def test_without_any_it_is_the_models() -> None:
    assert factors({}) == pytest.approx({"library": 1.0, "copy_engine:portable": 1.0})
    assert not any(one.is_near for one in estimate(MACHINE, WORK, NAMES, {}).values())


def test_by_one_just_like_it_nearly_all_is_corrected() -> None:
    by_one = 2 ** (1 / (1 + neighbours._DOUBT))
    assert factors(known()) == pytest.approx({"library": by_one, "copy_engine:portable": by_one})
    assert all(one.is_near for one in estimate(MACHINE, WORK, NAMES, known()).values())


def test_the_nearer_counts_more() -> None:
    near, far = known(m=256, factor=2.0), known(m=2048, factor=0.5)
    assert 1.5 < factors(near | far)["library"] < factors(near)["library"]
    assert factors(known(m=256))["library"] > factors(known(m=128))["library"] > 1.1
    assert factors(known(m=256))["library"] > factors(known(n=28672))["library"]


@pytest.mark.parametrize(
    "changed", [{"dtype": "float32"}, {"dtype": "int8"}, {"world_size": 2}, {"family": "gemm_all_scatter"}, {"m": 8192}]
)
def test_what_is_not_like_it_does_not_count(changed: dict[str, int | str]) -> None:
    assert factors(known(**changed))["library"] == pytest.approx(1.0, abs=1e-3)


def test_types_of_two_bytes_are_alike() -> None:
    assert factors(known(dtype="float16")) == factors(known())


def test_nor_do_rows_that_are_not_on_16_bytes() -> None:
    assert factors(known(k=4095)) == pytest.approx({"library": 1.0, "copy_engine:portable": 1.0})


def test_a_variant_that_was_not_measured_there_stays_as_predicted() -> None:
    table = known(names=("library",))
    estimates = estimate(MACHINE, WORK, [*NAMES, "kraken"], table)
    assert estimates.keys() == set(NAMES)  # kraken is not modelled
    assert estimates["library"].is_near
    assert not estimates["copy_engine:portable"].is_near
    assert factors(table)["copy_engine:portable"] == 1.0


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
    table = known(factor=0.5)
    ((key, measured),) = table.items()
    tuned = {key: replace(measured, configs={"copy_engine:portable": GemmConfig(128, 128, 64, num_stages=4)})}
    estimates = estimate(MACHINE, WORK, NAMES, tuned)
    assert estimates["copy_engine:portable"].us == predict_us(MACHINE, "copy_engine:portable", WORK)
    assert not estimates["copy_engine:portable"].is_near
    assert estimates["library"].is_near


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("family", list_families())
def test_fp32_is_left_to_the_library_unless_problems_like_it_were_measured(family: str, world_size: int) -> None:
    ours = [variant.name for variant in list_variants(family) if variant.has_kernels]
    for m in (1, 64, 512, 2048, 8192):
        problem = make_problem(family, m, 8192, 8192, world_size, torch.float32)
        assert choose(family, problem, ["library", *ours], gpu="NVIDIA H200").variant == "library"
        times = dict.fromkeys(["library", *ours], 1e3) | {"fused_sequential:portable:stream_k": 10.0}
        like = {key_of(family, make_problem(family, m, 8192, 8064, world_size, torch.float32)): Measured(times)}
        near = choose(family, problem, ["library", *ours], gpu="NVIDIA H200", tables=(like, {}))
        if world_size in (2, 4):  # of which there are measured constants
            assert near == Choice("fused_sequential:portable:stream_k", None, "predicted by problems like it")


def test_of_fp32_no_variant_multiplies_faster_than_its_gemm() -> None:
    for m in (2048, 8192):
        work = Work("gemm_all_reduce", m, 8192, 8192, 1, 4)
        flops_a_us = (
            2.0 * m * 8192 * 8192 / (predict_us(MACHINES["h200x2"], "fused_sequential:portable:stream_k", work) or 0)
        )
        assert flops_a_us < MACHINES["h200x2"].fp32_tflops * 1e6
