"""Arithmetic is, in the interpreter as on a GPU, that of the operands' values, of bf16 too, and not of its bits."""

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


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + lanes), tl.load(y_ptr + lanes)
    constant = tl.full((), 3, x.dtype)
    tl.store(out_ptr + lanes, x + y)
    tl.store(out_ptr + SIZE + lanes, 1.5 - x)
    tl.store(out_ptr + 2 * SIZE + lanes, x * y)
    tl.store(out_ptr + 3 * SIZE + lanes, x / y)
    tl.store(out_ptr + 4 * SIZE + lanes, -x * constant)
    tl.store(out_ptr + 5 * SIZE + lanes, tl.where(x < y, x, y))
    tl.store(out_ptr + 6 * SIZE + lanes, tl.maximum(x, y))
    tl.store(out_ptr + 7 * SIZE + lanes, tl.minimum(x, 0.5))
    tl.store(out_ptr + 8 * SIZE + lanes, tl.fma(x, y, x))
    tl.store(out_ptr + 9 * SIZE + lanes, tl.clamp(x, -0.5, 0.5))
    tl.store(out_ptr + 10 * SIZE + lanes, (lanes - 4).to(x.dtype))
    tl.store(out_ptr + 11 * SIZE + lanes, x.to(tl.float64).to(x.dtype))
    tl.store(out_ptr + 12 * SIZE + lanes, (x * 4).to(tl.int32).to(x.dtype))
    tl.store(out_ptr + 13 * SIZE + lanes, tl.sum(x, axis=0))
    tl.store(out_ptr + 14 * SIZE + lanes, tl.cumsum(x, axis=0))
    tl.store(out_ptr + 15 * SIZE + lanes, tl.cumprod(y, axis=0))


def compute(rank: int, world_size: int, dtype: torch.dtype) -> None:
    device = context().get_device()
    x, y = (torch.randn(16, generator=torch.Generator().manual_seed(seed)).to(device, dtype) for seed in (0, 1))
    out = torch.empty(16, 16, device=device, dtype=dtype)
    arithmetic_kernel[(1,)](x, y, out, 16)
    x, y, lanes = x.double(), y.double(), torch.arange(16, device=device)
    expected = [x + y, 1.5 - x, x * y, x / y, -3 * x, torch.minimum(x, y), torch.maximum(x, y), x.clamp(max=0.5)]
    expected += [x * y + x, x.clamp(-0.5, 0.5), lanes - 4, x, (x * 4).int(), x.sum().expand(16), x.cumsum(0)]
    expected.append(y.cumprod(0))
    # A rounding is off by half of eps of what is added, and where bf16 is truncated by all of it. A sum or a product of
    # 16 numbers has 15, and one where it is stored; these come out closer, as some of them cancel.
    whole, eps = torch.stack([row.double() for row in expected]), torch.finfo(dtype).eps
    sizes = whole.abs()
    sizes[8], sizes[13], sizes[14] = 2 * ((x * y).abs() + x.abs()), 16 * x.abs().sum(), 16 * x.abs().cumsum(0)
    sizes[15] *= 16
    off = (out.double() - whole).abs()
    allowed = torch.minimum(sizes * (eps if dtype == torch.bfloat16 else eps / 2), 4 * eps * (1 + whole.abs()))
    assert not (off > allowed).any(), (off / allowed).amax(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_arithmetic_is_of_values(ranks: Callable[[int], Ranks], dtype: torch.dtype) -> None:
    ranks(1).call(compute, dtype)
