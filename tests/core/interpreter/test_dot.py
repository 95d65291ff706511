"""Products are, in the interpreter as on a GPU, those of the operands' values, in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.dot(tl.load(a_ptr + places), tl.load(b_ptr + places), input_precision="ieee")
    tl.store(c_ptr + places, total)


def multiply(rank: int, world_size: int, dtype: torch.dtype) -> float:
    device = context().get_device()  # interpreted from here on, on a CPU
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).to(device, dtype) for seed in (0, 1))
    c = torch.empty(16, 16, device=device)
    dot_kernel[(1,)](a, b, c, 16)
    return (c - a.double() @ b.double()).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dot_multiplies_values(ranks: Callable[[int], Ranks], dtype: torch.dtype) -> None:
    assert ranks(1).call(multiply, dtype)[0] < 1e-5
