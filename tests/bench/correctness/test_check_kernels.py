"""Every kernel of ours is free of races, and the checker finds every bug that is planted in one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import triton
import triton.language as tl
from families import FUSED, name
from typer.testing import CliRunner

from iris_bench.cli import app
from iris_bench.correctness.check.cases import Case, make_cases, run_case
from iris_bench.correctness.check.planted import PLANTED, Planted
from iris_bench.measure.families import FAMILIES
from iris_bench.measure.inputs import Draw
from iris_bench.measure.shapes import Shape, parse_shapes
from iris_core import iris
from iris_core.checker import check
from iris_core.checker.replacing import replaced
from iris_kernels.all_gather_gemm import copies
from iris_kernels.common.device import handshake
from overlap_taxonomy import Variant, get_variant


def cases_of(variant: Variant, world_size: int) -> list[Case]:
    return make_cases(variant.family, variant.name, world_size=world_size, dtype="bf16")


def case_of(variant: Variant, world_size: int) -> Case:
    ragged, *_ = cases_of(variant, world_size)
    return ragged


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_has_no_rows_or_no_columns(world_size: int) -> None:
    cases = cases_of(get_variant("all_gather_gemm", "copy_engine:library"), world_size)
    problems, last = [case.problem() for case in cases], world_size - 1
    sizes = [(problem.a_shape(last)[0], problem.b_shape(last)[1]) for problem in problems]
    assert [(rows > 0, columns > 0) for rows, columns in sizes] == [(True, True), (False, True), (True, False)]


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_no_kernel_of_ours_has_a_race(variant: Variant) -> None:
    ragged, *small = cases_of(variant, 2)
    some = [(ragged, 2), *((case, 1) for case in small)]  # in order, and reversed; `make check` takes more
    for case, schedules in some:
        report = run_case(case, schedules=schedules, seed=0, calls=2)
        assert report.ok, report
        assert report.schedules == schedules


# The second adds rows and norms them, each behind flags of all ranks.
WITH_THREE = ("fused_sequential:portable", "gemm_all_reduce-fused_sequential:portable:stream_k")


@pytest.mark.parametrize("variant", [v for v in FUSED if v.name in WITH_THREE or name(v) in WITH_THREE], ids=name)
def test_nor_with_three_ranks(variant: Variant) -> None:
    report = run_case(case_of(variant, 3), schedules=1, seed=1)
    assert report.ok, report


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_nor_where_operands_are_copied_first(variant: Variant) -> None:
    case = replace(case_of(variant, 2), descriptors=True)
    if not case.unsupported_reason():
        report = run_case(case, schedules=1, seed=0, calls=2)
        assert report.ok, report


@triton.jit
def wait_for_nobody(flags_ptr, peers, epoch, WORLD_SIZE: tl.constexpr):
    """`_wait_for_all`, or `_signal_all`, that does nothing."""


@pytest.mark.parametrize("family", ["gemm_all_scatter", "gemm_reduce_scatter"])
def test_nor_where_all_peers_are_told_at_once(family: str) -> None:
    """As kernels in Gluon do; and what is left out there is found."""
    case = case_of(get_variant(family, "bulk_synchronous:portable"), 3)
    with mock.patch.object(handshake, "in_gluon", return_value=True):
        report = run_case(case, schedules=2, seed=0)
        assert report.ok, report
        for left_out in (handshake._wait_for_all, handshake._signal_all):
            with replaced(left_out, wait_for_nobody):
                assert any(run_case(case, schedules=some, seed=0).found_ordering_fault for some in (1, 4))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_bugs_are_found(planted: Planted) -> None:
    """Within four schedules; most show in the first, which the four begin with."""
    report = planted.run(schedules=1, seed=0)
    if not report.found_ordering_fault:
        report = planted.run(schedules=4, seed=0)
    assert report.found_ordering_fault, report


def test_a_planted_bug_is_gone_again() -> None:
    bug = PLANTED[0]
    assert not bug.run(schedules=1, seed=0).ok
    assert run_case(case_of(get_variant(bug.family, bug.variant), 2), schedules=1, seed=0).ok


@triton.jit
def no_barrier(peers, WORLD_SIZE: tl.constexpr):
    """`all_gather_gemm_copy_engine_barrier` that does nothing."""


def gather(rank: int, world_size: int, *, reads: bool) -> None:
    ctx = iris(1 << 20, "cpu")
    case = Case(get_variant("all_gather_gemm", "copy_engine:portable"), Shape(45, 42, 34), world_size, "bfloat16")
    operator = case.variant.build(ctx, case.problem(), keep_gathered=reads)
    for call in range(3):
        operator(*FAMILIES["all_gather_gemm"].operands(case.problem(), rank, Draw(0, case.problem(), call, "cpu")))
        if reads:
            operator.gathered.clone()
    ctx.close()


@pytest.mark.parametrize("has_barrier", [True, False])
def test_what_was_gathered_may_be_read_until_the_next_call(has_barrier: bool) -> None:
    """Copies of the next call wait for it, unless they begin without a barrier of all ranks."""
    with (
        contextlib.nullcontext()
        if has_barrier
        else mock.patch.object(copies, "all_gather_gemm_copy_engine_barrier", no_barrier)
    ):
        report = check(partial(gather, reads=True), 3, schedules=2, seed=0)
    assert report.ok == has_barrier, report
    assert bool(report.races) != has_barrier


# Sums of bf16 outputs travel in fp32, too; all-reduce has most of them on the heap.
WITH_ROOM = [(variant, "fp32") for variant in FUSED]
WITH_ROOM += [(variant, "bf16") for variant in FUSED if variant.family == "gemm_all_reduce"]


@pytest.mark.parametrize(("variant", "dtype"), WITH_ROOM, ids=lambda one: one if isinstance(one, str) else name(one))
def test_the_heap_has_room_for_larger_problems(variant: Variant, dtype: str) -> None:
    """Operators are made and closed; interpreting calls of this size would take minutes."""
    (case,) = make_cases(variant.family, variant.name, world_size=2, dtype=dtype, shapes="701x640x690")
    report = run_case(case, schedules=1, seed=0, calls=0)
    assert report.ok, report


def test_shape_sets_are_those_of_the_family() -> None:
    cases = make_cases("all", "bulk_synchronous:portable", world_size=4, dtype="bf16", shapes="llama,1x2x3")
    for case in cases:
        collective = FAMILIES[case.variant.family].collective
        assert case.shape in parse_shapes("llama,1x2x3", collective=collective, world_size=4)
    assert len(cases) == 4 * 7


def test_the_command_says_what_it_checked() -> None:
    result = CliRunner().invoke(
        app, ["check", "--family", "gemm_all_scatter", "--variant", "fused_sequential:portable", "--schedules", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "2 of 2 without a fault" in result.output


@pytest.mark.parametrize("options", ["--descriptors", "--dtype fp8 --scales block", "--dtype fp8 --scales tensor"])
def test_the_command_checks_other_operands(options: str) -> None:
    arguments = [
        "--family",
        "gemm_all_scatter",
        "--variant",
        "fused_sequential:portable",
        "--schedules",
        "1",
    ]
    result = CliRunner().invoke(app, ["check", *arguments, *options.split()])
    assert result.exit_code == 0, result.output
    assert "2 of 2 without a fault" in result.output


def test_the_command_fails_where_there_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    racy = next(planted for planted in PLANTED if "relaxed acquire" in planted.name)
    monkeypatch.setattr(
        "iris_bench.correctness.check.show.run_case", lambda *_, **options: racy.run(schedules=1, seed=0)
    )
    result = CliRunner().invoke(
        app, ["check", "--family", "gemm_all_scatter", "--variant", "fused_sequential:portable"]
    )
    assert result.exit_code == 1
    assert "write by rank 1" in result.output
    assert "0 of 2 without a fault" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--family", "gemm"], "unknown family 'gemm'"),
        (["--variant", "library"], "only our kernels"),
        (["--world-size", "0"], "--world-size 0"),
        (["--schedules", "0"], "--schedules 0"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--shapes", "3x4"], "3x4"),
        (["--scales", "row"], "--dtype fp8, not bf16"),
        (["--dtype", "fp8", "--scales", "column"], "unknown --scales 'column'"),
        (["--variant", "warp_specialized:sm90"], "gemm_reduce_scatter/warp_specialized:sm90"),
        (["--family", "gemm_all_scatter", "--variant", "warp_specialized:sm90"], "nothing of it can be checked"),
        (["--planted", "--family", "all"], "leave --family out"),
        (["--planted", "--schedules", "1", "--descriptors"], "leave --descriptors out"),
    ],
)
def test_bad_usage_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_planted_bugs_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_bench.correctness.check.planted.PLANTED", PLANTED[:1])
    result = CliRunner().invoke(app, ["check", "--planted", "--schedules", "1"])
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith("found 1 of 1")
