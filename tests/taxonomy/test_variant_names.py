"""The names of variants: patterns, main loops and schedules; a pattern by itself; names that others have replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext
from families import make_problem

from iris_bench.measure.sweep import select_variants
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.hopper import host as hopper
from overlap_taxonomy import (
    Mainloop,
    Schedule,
    Variant,
    current_name,
    full_name,
    get_variant,
    is_retired,
    list_families,
    list_variants,
    registry,
)
from overlap_taxonomy.choice import choice_of

GATHER = "all_gather_gemm"
STREAM_K = "fused_sequential:portable:stream_k"
EARLIER = ("bulk_synchronous", "fused_sequential", "one_shot", "warp_specialized", "workgroup_specialized")  # of all
OURS = [variant for variant in list_variants() if variant.has_kernels]


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        yield


@pytest.fixture
def unwarned() -> Iterator[None]:
    """As at the start of a process."""
    registry._warn_of_former_name.cache_clear()
    yield
    registry._warn_of_former_name.cache_clear()


def test_names_are_the_axes() -> None:
    for variant in OURS:
        assert variant.name == full_name(variant.pattern, variant.mainloop, variant.schedule)
        assert variant.mainloop in (Mainloop.PORTABLE, Mainloop.SM90, Mainloop.LIBRARY)
        assert (variant.schedule is Schedule.OWN) == (variant.mainloop is Mainloop.LIBRARY)
        assert variant.schedule in (Schedule.DATA_PARALLEL, Schedule.STREAM_K, Schedule.OWN)
    assert full_name("copy_engine", Mainloop.SM90, Schedule.DATA_PARALLEL) == "copy_engine:sm90"
    assert full_name("fused_sequential", Mainloop.PORTABLE, Schedule.STREAM_K) == STREAM_K
    assert full_name("bulk_synchronous", Mainloop.LIBRARY, Schedule.OWN) == "bulk_synchronous:library"
    for variant in list_variants():
        assert variant.has_kernels == (":" in variant.name)
        assert variant.has_kernels or variant.mainloop not in (Mainloop.PORTABLE, Mainloop.SM90, Mainloop.LIBRARY)


def test_a_pattern_with_one_implementation_is_that_one() -> None:
    assert get_variant(GATHER, "producer_consumer").name == "producer_consumer:portable"
    assert get_variant("gemm_all_scatter", "copy_engine").name == "copy_engine:portable"
    assert get_variant("gemm_all_scatter", "bulk_synchronous").name == "bulk_synchronous:portable"  # the paper's
    assert get_variant("gemm_reduce_scatter", "warp_specialized").name == "warp_specialized:sm90"
    assert get_variant("gemm_all_scatter", "library").name == "library"
    for family in ("gemm_all_scatter", "gemm_reduce_scatter"):  # stream-K is for few rows there: by its full name
        assert get_variant(family, "fused_sequential") is get_variant(family, "fused_sequential:portable")
    for family in (GATHER, "gemm_all_reduce"):
        assert get_variant(family, "fused_sequential") is get_variant(family, STREAM_K)


def made(pattern: str, config: GemmConfig | None = None, dtype: torch.dtype = torch.bfloat16) -> str:
    """The variant whose operator a pattern makes."""
    case = Case(pattern, "sm_90", family=GATHER, world_size=2)
    problem = make_problem(GATHER, 512, 512, 512, 2, dtype)
    variant = get_variant(GATHER, pattern)
    assert not variant.has_kernels  # they are behind the full names
    assert variant.unsupported_reason(problem, config) is None
    return variant.build(StubContext(case), problem, config).variant


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("pattern", ["copy_engine", "workgroup_specialized"])
def test_a_pattern_takes_the_main_loop_that_can_do_it(pattern: str) -> None:
    narrow = GemmConfig(64, 64, 64, num_warps=4, num_stages=3)
    assert made(pattern) == f"{pattern}:sm90"
    assert made(pattern, narrow) == f"{pattern}:portable"
    assert made(pattern, dtype=torch.float32) == f"{pattern}:portable"
    with mock.patch.object(hopper, "machine_reason", return_value="another GPU"):
        assert made(pattern) == f"{pattern}:portable"


def stub(mainloop: Mainloop, schedule: Schedule = Schedule.DATA_PARALLEL, reason: str | None = None) -> Variant:
    name = full_name("p", mainloop, schedule)
    build: Callable[..., Any] = lambda ctx, problem, config=None, **options: (name, options)  # noqa: E731
    return replace(
        OURS[0],
        pattern="p",
        mainloop=mainloop,
        schedule=schedule,
        build=build,
        unsupported_reason=lambda problem, config: reason,
    )


def test_a_pattern_that_can_do_nothing_says_what_the_portable_one_says() -> None:
    chosen = choice_of([stub(Mainloop.PORTABLE, reason="too many"), stub(Mainloop.SM90, reason="no Hopper")])
    assert chosen.name == "p"
    assert chosen.unsupported_reason(None, None) == "too many"
    assert chosen.build(None, None, option=1) == ("p:portable", {"option": 1})


def test_a_pattern_that_has_only_another_schedule_is_that_one() -> None:
    only = stub(Mainloop.PORTABLE, Schedule.STREAM_K)
    assert choice_of([only]) is only


@pytest.mark.parametrize("family", list_families())
def test_every_variant_has_a_former_name(family: str) -> None:
    """But those that are younger than the full names."""
    present = {current_name(family, one.former_name or one.pattern) for one in list_variants(family)}
    assert present == {one.name for one in list_variants(family) if one.mainloop is not Mainloop.LIBRARY}
    assert all(":" in current_name(family, name) for name in EARLIER)
    for name in ("library", "auto", "gemm_alone", "a name that never was"):
        assert current_name(family, name) == name


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("family", "former", "present"),
    [
        (GATHER, "warp_specialized_copies", "copy_engine:sm90"),
        (GATHER, "warp_specialized", "workgroup_specialized:sm90"),
        *((family, "one_shot", STREAM_K) for family in list_families()),
    ],
)
def test_a_former_name_warns_once(family: str, former: str, present: str) -> None:
    with pytest.warns(FutureWarning, match=f"variant '{former}' of {family} is called '{present}' now") as said:
        assert get_variant(family, former).name == present
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_variant(family, former).name == present
        assert current_name(family, former) == present


RETIRED = [(one, full, former) for one in list_variants() for full, former in one.retired.items()]


@pytest.mark.parametrize(
    ("instead", "full", "former"), RETIRED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_variant_that_is_no_more_names_what_to_take(instead: Variant, full: str, former: str) -> None:
    """In calls; in files it keeps its name, by which its results are still read."""
    family, said = instead.family, f"is no more; take '{instead.name}'"
    with pytest.raises(ValueError, match=f"variant '{full}' of family '{family}' {said}"):
        get_variant(family, full)
    with pytest.raises(ValueError, match=f"variant '{full}' of family '{family}' {said}"):
        select_variants([family], full)
    assert current_name(family, former) == current_name(family, full) == full
    assert is_retired(family, full)
    assert not is_retired(family, instead.name)
    if former not in {one.pattern for one in list_variants(family)}:
        with pytest.raises(ValueError, match=f"variant '{former}' of family '{family}' {said}"):
            get_variant(family, former)


def test_names_that_still_stand_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for variant in list_variants():
            get_variant(variant.family, variant.name)
            get_variant(variant.family, variant.pattern)


def test_an_unknown_variant_is_answered_with_names_and_patterns() -> None:
    with pytest.raises(
        ValueError, match=r"known variants: library, .*copy_engine:sm90.*; by their patterns: "
    ) as error:
        get_variant(GATHER, "magic")
    assert "copy_engine," in f"{str(error.value).split('by their patterns: ')[1]},"


@pytest.mark.usefixtures("unwarned")
def test_a_command_line_takes_all_forms() -> None:
    copies = [f"copy_engine:{name}" for name in ("library", "portable", "sm90")]
    assert select_variants([GATHER], "copy_engine") == {GATHER: copies}
    assert select_variants([GATHER], "copy_engine:sm90,library") == {GATHER: ["copy_engine:sm90", "library"]}
    both = ["fused_sequential:portable", STREAM_K]
    assert select_variants(["gemm_all_scatter"], f"fused_sequential,{STREAM_K}") == {"gemm_all_scatter": both}
    with pytest.warns(FutureWarning, match="is called"):
        assert select_variants(["gemm_all_scatter", GATHER], "warp_specialized") == {
            "gemm_all_scatter": ["warp_specialized:sm90"],
            GATHER: ["workgroup_specialized:sm90"],
        }
    with pytest.raises(ValueError, match="unknown variant 'copy' of all_gather_gemm; known variants: all, library"):
        select_variants([GATHER], "copy")
