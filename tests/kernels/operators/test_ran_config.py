"""What an operator was asked for and what a call ran with are two things: one call's operands decide for no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import Case, StubContext, make_problem, recorded_launches

from overlap_taxonomy import get_variant

CASE = Case("fused_sequential:portable", "sm_90", family="gemm_reduce_scatter", size=1024)


def operands(problem: Any, *, describable: bool) -> tuple[torch.Tensor, torch.Tensor]:
    (m, k), (_, n) = problem.a_shape(0), problem.b_shape(0)
    width = k if describable else k + 1  # rows that do not start on 16 bytes
    return torch.empty(m, width, dtype=CASE.dtype)[:, :k], torch.empty(n, k, dtype=CASE.dtype).t()


@pytest.mark.parametrize("first", [True, False])
def test_a_call_with_awkward_operands_does_not_change_the_next(first: bool) -> None:
    with recorded_launches() as launches:
        operator = get_variant(CASE.family, CASE.variant).build(StubContext(CASE), make_problem(CASE))
        asked = operator.config
        assert asked.descriptors
        assert operator.ran_config == asked
        for describable in (first, not first, first):
            operator(*operands(operator.problem, describable=describable))
            assert operator.config == asked
            assert operator.ran_config == asked
            assert operator.describe_config().endswith("descriptors" if describable else "descriptors copied=A")
            kernel = f"{CASE.family}_{get_variant(CASE.family, CASE.variant).pattern}"
            names = [kernel.fn.__name__ for kernel, _ in launches]
            assert names == [kernel] if describable else ["copy_operands_kernel", kernel]
            launches.clear()
