"""libdevice's functions give interpreted what they give on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context, raised
from triton.language.extra import libdevice

from iris_core.interpreter.libdevice import INTERPRETED

DTYPES = [torch.float32, torch.float64]


@triton.jit
def functions_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + lanes), tl.load(y_ptr + lanes)
    tl.store(out_ptr + lanes, libdevice.tanh(x))
    tl.store(out_ptr + SIZE + lanes, libdevice.erf(x[:, None]).reshape(SIZE))
    tl.store(out_ptr + 2 * SIZE + lanes, libdevice.pow(y, x))
    tl.store(out_ptr + 3 * SIZE + lanes, libdevice.rint(2 * x))
    tl.store(out_ptr + 4 * SIZE + lanes, libdevice.atan2(x, tl.load(y_ptr)))
    tl.store(out_ptr + 5 * SIZE + lanes, tl.where(libdevice.isnan(libdevice.log(x)), 1.0, 0.0))
    tl.store(out_ptr + 6 * SIZE + lanes, libdevice.exp(tl.load(x_ptr)))


@triton.jit
def fast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    x = tl.load(x_ptr + lanes)
    tl.store(out_ptr + lanes, libdevice.fast_expf(x))
    tl.store(out_ptr + SIZE + lanes, libdevice.fast_dividef(x, libdevice.fast_exp10f(x)))


def compute(rank: int, world_size: int, dtype: torch.dtype) -> None:
    device = context().get_device()
    x, y = (torch.randn(16, generator=torch.Generator().manual_seed(seed)).to(device, dtype) for seed in (0, 1))
    y = y.abs()
    out = torch.empty(7, 16, device=device, dtype=dtype)
    functions_kernel[(1,)](x, y, out, 16)
    same = [x.tanh(), x.erf(), y.pow(x), (2 * x).round(), torch.atan2(x, y[0]), (x < 0).to(dtype)]
    torch.testing.assert_close(out, torch.stack([*same, x[0].exp().expand(16)]))
    if dtype == torch.float32:
        fast_kernel[(1,)](x, out, 16)
        ulps = 16 * torch.finfo(dtype).eps  # CUDA's bounds: 2 + 1.16 |x|, and 2 + 2.95 |x| and 2 for the quotient
        torch.testing.assert_close(out[:2], torch.stack([x.exp(), x / 10**x]), rtol=ulps, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_of_floats(ranks: Callable[[int], Ranks], dtype: torch.dtype) -> None:
    ranks(1).call(compute, dtype)


@triton.jit
def rounded_down_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, libdevice.add_rd(tl.load(x_ptr), 1.0))


@triton.jit
def tanh_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, libdevice.tanh(tl.load(x_ptr)))


def mistakes(rank: int, world_size: int) -> list[tuple[str, str]]:
    context()
    x, whole = torch.ones(1), torch.ones(1, dtype=torch.int32)
    return [raised(kernel[(1,)], given, x) for kernel, given in ((rounded_down_kernel, x), (tanh_kernel, whole))]


def test_what_is_not_interpreted_is_said(pools: object) -> None:
    (unknown, other_dtype) = pools.ranks(1, "cpu").call(mistakes)[0]  # type: ignore[attr-defined]
    assert "libdevice.add_rd is not interpreted; these are: abs, " in unknown[1]
    assert "libdevice.tanh of int32: it takes fp32, or fp64" in other_dtype[1]


def test_names_stay_by_which_compiled_code_finds_them() -> None:
    for name, function in INTERPRETED.items():
        assert (function.__module__, function.__name__) == ("triton.language.extra.libdevice", name)
