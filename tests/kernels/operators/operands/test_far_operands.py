"""Operands whose elements lie more than 2**31 elements apart: their places are reckoned in 64 bits."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable

import pytest
import torch
from checking import fault, make_data, poison
from compiling import NO_RESERVE
from families import FUSED, make_problem, name
from ranks import Ranks, context

from overlap_taxonomy import Variant, get_variant

pytestmark = pytest.mark.parametrize("device", ["cpu"])

DISTANCE = 1 << 26  # of columns of A and rows of B, in elements; most of it is addresses without memory behind them
K = 80  # a rank has 40 of them where k is cut, and a step of k has 32


def far_apart(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a copy whose neighbours along `dim` lie far apart."""
    size = matrix.shape[dim] * DISTANCE * matrix.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | NO_RESERVE)
    strides = (DISTANCE, 1) if dim == 0 else (1, DISTANCE)
    copy = torch.frombuffer(memory, dtype=matrix.dtype).as_strided(matrix.shape, strides)
    assert (matrix.shape[dim] - 1) * DISTANCE > 2**31
    return copy.copy_(matrix)


def call_far(rank: int, world_size: int, family: str, variant: str, seed: int) -> str | None:
    ctx = context()
    problem = make_problem(family, 9, 20, K, world_size, torch.bfloat16)
    operator = get_variant(family, variant).build(ctx, problem)
    data = make_data(family, problem, rank, seed, ctx.get_device())
    poison(operator)
    ctx.barrier()
    output = operator.as_matrix(operator(far_apart(data.a, 1), far_apart(data.b, 0)))
    wrong = fault(output, data, problem.dtype)
    operator.close()
    return wrong


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_elements_may_lie_far_apart(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    assert ranks(2).call(call_far, variant.family, variant.name, seed) == [None, None]
