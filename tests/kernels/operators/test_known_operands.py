"""What calls keep of operands that were checked: where they lie, their rows, and when that is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families import make_problem
from ranks import Ranks, close_context, context, raised

from iris_kernels.all_gather_gemm import all_gather_gemm
from overlap_taxonomy import get_variant

pytestmark = pytest.mark.parametrize("device", ["cpu"])
FAMILY = "gemm_all_scatter"
DTYPE = torch.bfloat16


def matrix(ctx: Any, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=ctx.get_device(), dtype=DTYPE)


def check_once(rank: int, world_size: int, variant: str) -> tuple[list[int], list[tuple[str, str]]]:
    ctx = context()
    problem = make_problem(FAMILY, 8, 6, 4, world_size, DTYPE)
    operator = get_variant(FAMILY, variant).build(ctx, problem)
    a, b = matrix(ctx, 8, 4), matrix(ctx, 4, 3)
    checks = []
    with mock.patch.object(type(operator), "_check", autospec=True, side_effect=type(operator)._check) as check:
        for one in (a, a, a.clone(), a):
            operator(one, b)
            checks.append(check.call_count)
        errors = [raised(operator, one, b) for one in (a.view(torch.float16), a.view(4, 8))]
    operator.close()
    return checks, errors


@pytest.mark.parametrize("variant", ["library", "fused_sequential:portable"])
def test_operands_are_checked_once_where_they_lie(ranks: Callable[[int], Ranks], variant: str) -> None:
    """And again where anything of them is another: here the address alone is the same."""
    for checks, errors in ranks(2).call(check_once, variant):
        assert checks == [1, 1, 2, 2]
        for (kind, message), part in zip(errors, ("A is torch.float16", "A's columns"), strict=True):
            assert kind == "ValueError"
            assert part in message


def give_what_equals(rank: int, world_size: int) -> tuple[list[tuple[str, str]], list[bool]]:
    """Give sizes, and operands, that are refused, before those that are right."""
    close_context()
    ctx = context()
    a, b = matrix(ctx, 3, 4), matrix(ctx, 4, 5)
    operator = get_variant("all_gather_gemm", "library").build(ctx, make_problem("all_gather_gemm", 6, 10, 4, 2, DTYPE))
    errors = [raised(all_gather_gemm, ctx, a, b, m=m) for m in (6.0, np.int64(6))]
    errors += [raised(operator, a, b, m=m) for m in (6.0, np.int64(6))]
    with torch.no_grad():
        errors += [raised(all_gather_gemm, ctx, a, b, m=6, **{name: [1.0]}) for name in ("bias", "scale")]
    outputs = [all_gather_gemm(ctx, a, b, m=6), operator(a, b, m=6)]
    operator.close()
    return errors, [one.eq(4.0).all().item() and tuple(one.shape) == (6, 5) for one in outputs]


def test_what_equals_a_size_and_is_none_is_refused_and_not_kept(ranks: Callable[[int], Ranks]) -> None:
    expected = ["m is 6.0; it takes", "m is np.int64(6); it takes"] * 2
    expected += ["bias is a list; it must be a torch.Tensor", "scale is a list; it must be a torch.Tensor"]
    for errors, are_right in ranks(2).call(give_what_equals):
        assert are_right == [True, True]
        for (kind, message), part in zip(errors, expected, strict=True):
            assert kind == "ValueError"
            assert part in message


def make_room(rank: int, world_size: int) -> tuple[tuple[str, str], int]:
    """Make room for more rows, of which a rank's own no longer say how many all have."""
    ctx = context()
    operator = get_variant("all_gather_gemm", "library").build(ctx, make_problem("all_gather_gemm", 8, 10, 4, 2, DTYPE))
    a, b = matrix(ctx, 4, 4), matrix(ctx, 4, 5)
    with mock.patch.object(type(operator), "_check", autospec=True, side_effect=type(operator)._check) as check:
        operator(a, b)
        operator.reserve(16)
        error = raised(operator, a, b)
        operator(a, b, m=8)
        checks = check.call_count
    operator.close()
    return error, checks


def test_what_was_known_of_operands_is_forgotten_with_the_memory(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), checks in ranks(2).call(make_room):
        assert kind == "ValueError"
        assert "with fewer rows, give m" in message
        assert checks == 2
