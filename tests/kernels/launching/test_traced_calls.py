"""Calls of any rows, made of one that was traced, queue what their variant would; and what a new M makes is little."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, make_problem
from driving import SIZE, build, case_of, driven, matrix, operands, same_outputs
from families import name

from iris_kernels.common.launch import kernels
from iris_kernels.common.launch.trace import Untraceable
from iris_kernels.common.operators import calls_by_rows, prepared
from iris_kernels.common.operators.calls_by_rows import CallsByRows
from iris_kernels.common.portable.row_norm import RmsNorm
from overlap_taxonomy import Mainloop, Variant, get_variant, list_variants

WITH_KERNELS = [variant for variant in list_variants() if variant.has_kernels]
SOME = sorted({1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, SIZE, *random.Random(0).sample(range(1, SIZE), 15)})
MANY = random.Random(1).sample(range(1, SIZE + 1), 200)
FP8 = {"dtype": torch.float8_e4m3fn, "scales": ("row", "column"), "out_dtype": torch.bfloat16}
REDUCES, GATHERS = ("gemm_reduce_scatter", "gemm_all_reduce"), ("all_gather_gemm",)
CASES: dict[str, tuple[tuple[str, ...] | None, dict[str, Any]]] = {  # of which families, of all; what they change
    "plain": (None, {}),
    "two ranks": (None, {"world_size": 2}),
    "last rank of four": (None, {"rank": 3}),
    "alone": (None, {"world_size": 1, "rank": 0}),
    "epilogue": (None, {"epilogue": ("scale", "bias", "residual", "silu")}),
    "fp8": (None, FP8),
    "fp8 blocks": (None, {**FP8, "scales": ("block", "block")}),
    "norm": (REDUCES, {"norm": RmsNorm(1e-6, torch.float8_e4m3fn)}),
    "quantised": (GATHERS, {**FP8, "given": torch.bfloat16}),
}


class Loaded:
    """A kernel whose launches are written down."""

    def __init__(self, log: Any, kernel: Any, options: dict[str, Any]) -> None:
        self._log, self._what = log, (kernel, *options.items())

    def expanding(self, index: int) -> Callable[..., Any]:
        name = self._what[0].params[index].name

        def expanded(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
            self.described(name)
            return (("descriptor", name, address, shape, strides), *shape, *strides)

        return expanded

    def described(self, name: str) -> None:
        """Be told of an argument that a descriptor is made of."""

    def launching_expanded(self, num_programs: int, stream: Any, arguments: tuple[Any, ...]) -> Callable[[], None]:
        entry = ("launch", *self._what, num_programs, stream if isinstance(stream, int) else 0, arguments)
        return lambda: self._log.entries.append(entry)


@contextlib.contextmanager
def written_down(log: Any) -> Iterator[None]:
    """Within the block nothing is compiled, and launches are written down."""

    def loaded(kernel: Any, num_programs: int, arguments: Any, options: Any) -> Loaded:
        return Loaded(log, kernel, options)

    with mock.patch.object(kernels.Kernels.__init__, "__defaults__", (loaded,)):
        yield


def calls_of(operator: Any, case: Case, rows: list[int]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return arguments of calls of these numbers of rows, whose A lies elsewhere in each, and B and the rest mostly."""
    problem, calls = operator.problem, []
    b = matrix(problem.b_shape(case.rank), by_columns=True, dtype=problem.b_dtype)
    for m in rows:
        some = problem.with_rows(m)
        a = matrix(some.a_shape(case.rank), dtype=some.a_dtype)
        shapes = some.operand_shapes(case.rank).items()
        calls.append(((a, b), {"m": m, **{one: torch.empty(of, dtype=some.operand_dtype(one)) for one, of in shapes}}))
    return calls


def queued(operator: Any, log: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """Return what calls queue, which copies come first, and where their outputs lie."""
    found = []
    for data, how in calls:
        outputs = operator.call(*data, **how)
        where = [(one.data_ptr(), one.shape, one.stride()) for one in outputs]
        last = [*operator._channel.prepared.values()][-1]
        copies = [(one, to.data_ptr(), to.shape, to.stride()) for one, to in last.copies]
        found.append((log.take(), copies, where, operator.describe_config()))
    return found


@pytest.mark.parametrize("new_outputs", [True, False])
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("variant", WITH_KERNELS, ids=name)
def test_calls_of_any_rows_queue_what_their_variant_would(variant: Variant, case_name: str, new_outputs: bool) -> None:
    families, changes = CASES[case_name]
    if families is not None and variant.family not in families:
        pytest.skip(f"{case_name} is for {', '.join(families)}")
    case = replace(case_of(variant), **changes)
    if variant.mainloop is Mainloop.LIBRARY and (reason := variant.unsupported_reason(make_problem(case), None)):
        pytest.skip(reason)
    with driven(case) as (ctx, log, _), written_down(log), same_outputs():
        operator = build(case, ctx, new_outputs=new_outputs)
        calls = calls_of(operator, case, SOME)
        made = queued(operator, log, calls)
        assert operator._channel.templates
        operator._channel.clear()
        with mock.patch.object(CallsByRows, "traced", side_effect=Untraceable):
            assert queued(operator, log, calls) == made


GATHER = [one for one in WITH_KERNELS if one.family == "all_gather_gemm" and one.name != "fused_sequential:portable"]


@pytest.mark.parametrize("variant", GATHER, ids=name)
def test_calls_that_keep_what_they_gather_do_too(variant: Variant) -> None:
    case = case_of(variant)
    with driven(case) as (ctx, log, _), written_down(log), same_outputs():
        operator = build(case, ctx, keep_gathered=True)
        calls = calls_of(operator, case, SOME)
        made = queued(operator, log, calls)
        operator._channel.clear()
        with mock.patch.object(CallsByRows, "traced", side_effect=Untraceable):
            assert queued(operator, log, calls) == made


# Of 200 numbers of rows up to 1024 over two ranks, of how many the variant is asked; of the others calls are made.
MOST_TRACED = 6
MORE_TRACED = {"stream_k": 19, "copy_engine": 19}  # that have a plan for each row of tiles, and copies by chunks


@pytest.mark.parametrize("variant", WITH_KERNELS, ids=name)
def test_of_few_numbers_of_rows_the_variant_is_asked(variant: Variant) -> None:
    case = replace(case_of(variant), world_size=2)
    most = max([most for what, most in MORE_TRACED.items() if what in variant.name], default=MOST_TRACED)
    with driven(case) as (ctx, log, _), written_down(log), same_outputs():
        operator = build(case, ctx, new_outputs=True)
        calls = calls_of(operator, case, MANY)
        with mock.patch.object(CallsByRows, "traced", autospec=True, side_effect=CallsByRows.traced) as traced:
            queued(operator, log, calls)
        assert 0 < traced.call_count <= most


SM90 = [variant for variant in WITH_KERNELS if variant.name.endswith("sm90")]


@pytest.mark.parametrize("variant", SM90, ids=name)
def test_a_weight_is_described_once(variant: Variant) -> None:
    """Of a new number of rows only what depends on it has new descriptors."""
    case = case_of(variant)
    with driven(case) as (ctx, log, _), written_down(log):
        operator = build(case, ctx, new_outputs=True)
        calls = calls_of(operator, case, MANY)
        queued(operator, log, calls[:100])
        described: list[str] = []
        with mock.patch.object(Loaded, "described", described.append):
            queued(operator, log, calls[100:])
        traced_anew = described.count("b")
        assert traced_anew <= 3
        assert 100 <= described.count("a") <= 100 + traced_anew


def test_templates_and_shapes_are_kept_in_bounds() -> None:
    case = case_of(get_variant("all_gather_gemm", "copy_engine:portable"))
    with (
        driven(case) as (ctx, log, _),
        written_down(log),
        mock.patch.multiple(prepared, _MOST_KINDS=2, _MOST_OF_A_KIND=3, _MOST_CALLS=20),
        mock.patch.object(calls_by_rows, "_MOST_KNOWN", 10),
    ):
        operator = build(case, ctx, new_outputs=True)
        kept = operator._channel
        for call in calls_of(operator, case, MANY):
            queued(operator, log, [call])
            assert len(kept.templates) <= 2
            assert all(len(one) <= 3 for one in kept.templates.values())
            assert len(kept.prepared) <= 20
            assert len(operator._calls.new_outputs) <= 10


def test_neither_operands_nor_outputs_are_kept() -> None:
    case = case_of(get_variant("gemm_reduce_scatter", "warp_specialized:sm90"))
    with driven(case) as (ctx, log, _), written_down(log):
        operator = build(case, ctx, new_outputs=True)
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):  # traced, and made of that
                a, b = operands(case)
                c = operator(a, b)
                gone = [weakref.ref(one) for one in (a, b, c)]
                del a, b, c
                assert [one() for one in gone] == [None] * 3
        finally:
            gc.enable()
