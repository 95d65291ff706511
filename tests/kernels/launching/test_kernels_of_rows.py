"""Calls of any number of rows share compiled kernels, and none gets one that was compiled for other integers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from compiling import make_problem
from driving import SIZE, build, case_of, driven, matrix
from families import name

from iris_kernels.common.launch import kernels
from iris_kernels.common.launch.kernels import Kernels, Kinds
from overlap_taxonomy import Variant, get_variant, list_variants

WITH_KERNELS = [variant for variant in list_variants() if variant.has_kernels]
ROWS = sorted({1, 2, 3, 127, 128, SIZE, *random.Random(0).sample(range(1, SIZE), 60)}, reverse=True)
MOST = 3  # kernels that differ in integers alone: as Triton would the first, and for any integers in two steps


class Compiled:
    """A kernel that was compiled for these arguments, and is launched nowhere."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def launching(self, *what: Any, **how: Any) -> Any:
        return lambda: None


def integers(kernel: Any, arguments: dict[str, Any]) -> list[int]:
    """Return the integers among the arguments of a launch, but compile-time ones."""

    def within(argument: Any) -> Iterator[int]:
        if type(argument) is int:
            yield argument
        elif isinstance(argument, tuple):
            for one in argument:
                yield from within(one)

    return [one for param in kernel.params if not param.is_constexpr for one in within(arguments[param.name])]


@contextlib.contextmanager
def checked_kernels() -> Iterator[list[Kernels]]:
    """Within the block nothing is compiled, and each launch gets a kernel that takes its integers; give all of them."""
    of, used = Kernels.of, []

    def checked(
        self: Kernels, kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any], kinds: Kinds
    ) -> Any:
        used.append(self)
        found: Any = of(self, kernel, num_programs, arguments, options, kinds)
        compiled_for, given = integers(kernel, found.arguments), integers(kernel, arguments)
        for one, other in zip(compiled_for, given, strict=True):
            assert one != 1 or other == 1
            assert one % 16 or other % 16 == 0
            assert one >= 1 << 31 or other < 1 << 31
        for param in kernel.params:
            assert not param.is_constexpr or found.arguments[param.name] == arguments[param.name]
        return found

    with (
        mock.patch.object(kernels, "compiled_kernel", lambda kernel, num_programs, arguments, options: arguments),
        mock.patch.object(kernels, "LoadedKernel", Compiled),
        mock.patch.object(Kernels, "of", checked),
    ):
        yield used


@pytest.mark.parametrize("variant", WITH_KERNELS, ids=name)
def test_numbers_of_rows_share_kernels(variant: Variant) -> None:
    case = case_of(variant)
    problem = make_problem(case)
    b = matrix(problem.b_shape(case.rank), by_columns=True)
    with driven(case) as (ctx, _, _), checked_kernels() as used:
        operator = build(case, ctx, new_outputs=True)
        for m in ROWS:
            operator(matrix(problem.with_rows(m).a_shape(case.rank)), b, m=m)
    assert all(one is used[0] for one in used)
    assert max(map(len, used[0]._made.values())) <= MOST


def test_operands_that_lie_otherwise_have_their_own_kernels() -> None:
    """One for any strides would load their elements one by one."""
    case = case_of(get_variant("gemm_all_scatter", "fused_sequential:portable"))
    problem = make_problem(case)
    b = matrix(problem.b_shape(case.rank), by_columns=True)
    k = problem.a_shape(case.rank)[1]
    with driven(case) as (ctx, _, _), checked_kernels() as used:
        pointers = replace(build(case, ctx).config, descriptors=False)
        operator: Any = get_variant(case.family, case.variant).build(ctx, problem, pointers)
        for strides in ((2 * k, 2), (k, 1)):
            operator(matrix((problem.m, 2 * k)).as_strided((problem.m, k), strides), b)
        assert len(used[-1]) == 2
