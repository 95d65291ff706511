"""Atomics of floats, interpreted: memory as of a GPU, and what was there before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context

NUMBERS, OTHERS = [1.5, -2.0, 3.0, -0.5], [-1.0, -3.0, 4.0, 0.25]


@triton.jit
def extremes_kernel(numbers_ptr, others_ptr, before_ptr, LARGEST: tl.constexpr, COUNT: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    others = tl.load(others_ptr + lanes)
    if LARGEST:
        before = tl.atomic_max(numbers_ptr + lanes, others)
    else:
        before = tl.atomic_min(numbers_ptr + lanes, others)
    tl.store(before_ptr + lanes, before)


def take_extremes(rank: int, world_size: int, dtype: torch.dtype, largest: bool) -> list[list[float]]:
    numbers = context().empty(4, dtype=dtype)
    numbers.copy_(torch.tensor(NUMBERS))
    before = torch.zeros(4, dtype=dtype)
    extremes_kernel[(1,)](numbers, torch.tensor(OTHERS, dtype=dtype), before, largest, 4)
    return [numbers.tolist(), before.tolist()]


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu"])
def test_a_minimum_of_floats_returns_what_was_there(
    ranks: Callable[[int], Ranks], dtype: torch.dtype, largest: bool
) -> None:
    expected = [(max if largest else min)(pair) for pair in zip(NUMBERS, OTHERS, strict=True)]
    assert ranks(1).call(take_extremes, dtype, largest) == [[expected, NUMBERS]]
