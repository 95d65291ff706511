"""What a call of a number of rows that is new takes the host, counted: no plan, no memory, no look-up by Triton.

Nor does an op look for an operator then, which is known by all but the rows.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext, make_problem
from driving import SIZE, build, case_of, counted, driven, matrix
from families import name
from test_kernels_of_rows import checked_kernels
from triton.runtime.jit import JITFunction

from iris_kernels.common.config import GemmConfig
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.operators import calls_by_rows, dispatch, torch_op
from iris_kernels.common.operators.dispatch import Operators
from iris_kernels.common.operators.product import op_of
from iris_kernels.common.problem import Problem
from iris_kernels.common.workspace import Workspace
from overlap_taxonomy import Choice, Variant, get_variant

# Functions of ours that a first call enters; each takes 0.2 to 1 us.
MOST_FRAMES = {
    ("gemm_all_scatter", "warp_specialized:sm90"): 35,
    ("gemm_all_scatter", "fused_sequential:portable:stream_k"): 45,
    ("gemm_reduce_scatter", "warp_specialized:sm90"): 43,
    ("gemm_reduce_scatter", "workgroup_specialized:portable"): 43,
    ("all_gather_gemm", "workgroup_specialized:sm90"): 42,
    ("gemm_all_reduce", "warp_specialized:sm90"): 43,
}


VARIANTS = [get_variant(*key) for key in MOST_FRAMES]
MOST_OF_AN_OP = 12  # that an op enters beside its operator's


def frames_of_new_rows(case: Case, call: Callable[[torch.Tensor, torch.Tensor, int], object]) -> float:
    """Return how many functions of ours calls of 200 new numbers of rows enter, behind 50 others: the median.

    Args:
        case: of the problem of the most rows.
        call: makes a call of an A, a B and a number of rows.
    """
    problem = make_problem(case)
    b = matrix(problem.b_shape(case.rank), by_columns=True)
    rows = random.Random(0).sample(range(65, SIZE), 250)
    taken = []
    for m in [SIZE, *rows[:50]]:  # have the operator made, and the kernels compiled
        call(matrix(problem.with_rows(m).a_shape(case.rank)), b, m)
    made = calls_by_rows._planned.cache_info().misses
    with nothing_is_looked_for():
        for m in rows[50:]:
            a = matrix(problem.with_rows(m).a_shape(case.rank))
            _, frames = counted(lambda a=a, m=m: call(a, b, m))  # type: ignore[misc]
            taken.append(frames)
    assert calls_by_rows._planned.cache_info().misses == made
    # Not the most: the collector's callbacks of others' tensors are counted with the call that they fall into.
    return statistics.median(taken)


@contextlib.contextmanager
def nothing_is_looked_for() -> Iterator[None]:
    """Within the block no memory is made, Triton is not asked, and no operator is looked for."""
    with contextlib.ExitStack() as refused:
        for owner, name in (
            (Workspace, "grow"),
            (JITFunction, "run"),
            (Operators, "_made"),
            (torch_op, "operators_for"),
            (dispatch, "replace"),
        ):
            error = AssertionError(f"{name} of {owner.__name__} was asked for")
            refused.enter_context(mock.patch.object(owner, name, side_effect=error))
        yield


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_calls_of_new_rows_take_the_host_few_operations(variant: Variant) -> None:
    case = case_of(variant)
    with driven(case) as (ctx, _, _), checked_kernels():
        operator = build(case, ctx, new_outputs=True)
        frames = frames_of_new_rows(case, lambda a, b, m: operator(a, b, m=m))
    assert frames <= MOST_FRAMES[variant.family, variant.name]


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_an_op_of_new_rows_finds_its_operator_at_once(variant: Variant) -> None:
    case, op = case_of(variant), op_of(variant.family)
    with driven(case) as (ctx, _, _), checked_kernels(), on_hopper():

        def call(a: torch.Tensor, b: torch.Tensor, m: int) -> None:
            op(a, [b], m, SIZE, SIZE, ctx.name, variant.name)

        frames = frames_of_new_rows(case, call)
    assert frames <= MOST_FRAMES[variant.family, variant.name] + MOST_OF_AN_OP


@contextlib.contextmanager
def on_hopper() -> Iterator[None]:
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        yield


def test_auto_chooses_once_for_a_number_of_rows_and_keeps_an_operator_a_variant() -> None:
    case = case_of(get_variant("gemm_reduce_scatter", "workgroup_specialized:portable"))
    few, many = "bulk_synchronous:portable", case.variant

    def choose(ctx: StubContext, problem: Problem, config: GemmConfig | None) -> Choice:
        return Choice(few if problem.m < 64 else many, None, "a test says so")

    auto = replace(get_variant(case.family, "auto"), choose=choose)
    with (
        driven(case) as (ctx, _, _),
        mock.patch.object(dispatch, "_MOST_FOUND", 4),
        mock.patch.object(Operators, "_chosen", autospec=True, side_effect=Operators._chosen) as chosen,
    ):
        operators: Any = Operators(ctx, auto, "auto", make_problem(case), None, {})
        made = [operators.of(m) for m in (256, 8, 256, 16, 8, 128)]
        assert [one.variant for one in made] == [many, few, many, few, few, many]
        assert len(set(map(id, made))) == 2
        assert [one.problem.m for one in made[:2]] == [256, 16]
        assert [one.args[1] for one in chosen.call_args_list] == [256, 8, 16, 128]
        assert [operators.of(m).variant for m in range(62, 67)] == [few, few, many, many, many]
        assert len(operators._choices) <= 4
        made[0].close()
        again = operators.of(256)
        assert not again.is_closed
        assert again.variant == many
