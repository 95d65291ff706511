"""What a call of a number of rows that is new takes the host, counted: no plan, no memory, no look-up by Triton."""

from __future__ import annotations

import random
import statistics
from unittest import mock

import pytest
from compiling import make_problem
from driving import SIZE, build, case_of, counted, driven, matrix
from families import name
from test_kernels_of_rows import checked_kernels
from triton.runtime.jit import JITFunction

from iris_kernels.common.operators import calls_by_rows
from iris_kernels.common.workspace import Workspace
from overlap_taxonomy import Variant, get_variant

# Functions of ours that a first call enters; each takes 0.2 to 1 us.
MOST_FRAMES = {
    ("gemm_all_scatter", "warp_specialized:sm90"): 42,
    ("gemm_all_scatter", "fused_sequential:portable:stream_k"): 55,
    ("gemm_reduce_scatter", "warp_specialized:sm90"): 49,
    ("gemm_reduce_scatter", "workgroup_specialized:portable"): 48,
    ("all_gather_gemm", "workgroup_specialized:sm90"): 48,
    ("gemm_all_reduce", "warp_specialized:sm90"): 49,
}


@pytest.mark.parametrize("variant", [get_variant(*key) for key in MOST_FRAMES], ids=name)
def test_calls_of_new_rows_take_the_host_few_operations(variant: Variant) -> None:
    case = case_of(variant)
    problem = make_problem(case)
    b = matrix(problem.b_shape(case.rank), by_columns=True)
    rows = random.Random(0).sample(range(65, SIZE), 250)
    with driven(case) as (ctx, _, _), checked_kernels():
        operator = build(case, ctx, new_outputs=True)
        made = calls_by_rows._planned.cache_info().misses
        for m in rows[:50]:  # have the kernels compiled
            operator(matrix(problem.with_rows(m).a_shape(case.rank)), b, m=m)
        with (
            mock.patch.object(Workspace, "grow", side_effect=AssertionError("memory was made")),
            mock.patch.object(JITFunction, "run", side_effect=AssertionError("Triton was asked")),
        ):
            taken = []
            for m in rows[50:]:
                a = matrix(problem.with_rows(m).a_shape(case.rank))
                _, frames = counted(lambda a=a, m=m: operator(a, b, m=m))  # type: ignore[misc]
                taken.append(frames)
        assert calls_by_rows._planned.cache_info().misses == made
    # Not the most: the collector's callbacks of others' tensors are counted with the call that they fall into.
    assert statistics.median(taken) <= MOST_FRAMES[variant.family, variant.name]
