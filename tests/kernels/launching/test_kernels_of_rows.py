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
from iris_kernels.common.launch.kernels import Kernels
from overlap_taxonomy import Variant, get_variant, list_variants

WITH_KERNELS = [variant for variant in list_variants() if variant.has_kernels]
ROWS = sorted({1, 2, 3, 127, 128, SIZE, *random.Random(0).sample(range(1, SIZE), 60)}, reverse=True)
MOST = 3  # kernels that differ in integers alone: as Triton would the first, and for any integers in two steps


class Compiled:
    """A kernel that was compiled for these arguments, whose launches are checked to be of arguments that it takes."""

    def __init__(self, compiled: tuple[Any, dict[str, Any]]) -> None:
        self.kernel, self.arguments = compiled

    def launching_expanded(self, num_programs: int, stream: Any, arguments: tuple[Any, ...]) -> Any:
        left = iter(arguments)
        for param in self.kernel.params:
            one, other = self.arguments[param.name], next(left)
            if hasattr(one, "block_shape") and not param.is_constexpr:
                assert other == (type(one), list(one.block_shape))
                for _ in range(2 * len(one.block_shape)):
                    next(left)
            else:
                check(one, other, is_constant=param.is_constexpr)
        assert next(left, None) is None
        return lambda: None

    def expanding(self, index: int) -> Any:
        of = self.arguments[self.kernel.params[index].name]
        return lambda address, shape, strides: ((type(of), list(of.block_shape)), *shape, *strides)


def check(one: Any, other: Any, *, is_constant: bool = False) -> None:
    """Check that what was compiled for an argument takes another: an integer, an address, constants, tuples of them."""
    if is_constant:
        assert one == other
    elif isinstance(one, tuple):
        for each, its in zip(one, other, strict=True):
            check(each, its)
    elif hasattr(one, "data_ptr"):
        assert one.data_ptr() % 16 or other % 16 == 0
    elif type(one) is int:
        assert type(other) is int
        assert one != 1 or other == 1
        assert one % 16 or other % 16 == 0
        assert one >= 1 << 31 or other < 1 << 31
    else:
        assert one is other


@contextlib.contextmanager
def checked_kernels() -> Iterator[list[Kernels]]:
    """Within the block nothing is compiled, and each launch gets a kernel that takes its integers; give all of them."""
    of, used = Kernels.of, []

    def noted(self: Kernels, *what: Any) -> Any:
        used.append(self)
        return of(self, *what)

    with (
        mock.patch.object(kernels, "compiled_kernel", lambda kernel, num_programs, arguments, _: (kernel, arguments)),
        mock.patch.object(kernels, "LoadedKernel", Compiled),
        mock.patch.object(Kernels, "of", noted),
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
