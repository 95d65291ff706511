"""RMSNorm of rows of C, with a residual before it: by every variant that sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from checking import FP32_ROUNDOFF, fault, make_data
from epilogues import finished_data, own_operands
from families import VARIANTS, make_problem, name
from ranks import Ranks, context

from iris_kernels.common.portable.row_norm import RmsNorm
from overlap_taxonomy import Variant, get_variant

EPS = 1e-5
# One that divides nothing; more rows of tiles than one, and tiles than programs; ranks without rows; rows that are not
# in registers as a whole (row_norm.py: of four warps' kernels 4096 columns are, of eight warps' 8192).
SIZES = [(33, 37, 41), (70, 132, 32), (1, 2, 7), (2, 8200, 4)]
FP8 = torch.float8_e4m3fn
SUMMING = [one for one in VARIANTS if one.family in ("gemm_reduce_scatter", "gemm_all_reduce")]
KERNELS = [one for one in SUMMING if not one.delegates]


def weight_of(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a norm's weights, with gaps between them in memory."""
    return torch.randn(2 * n, generator=torch.Generator().manual_seed(5)).to(dtype)[::2]


def normed_fault(c: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, scales: torch.Tensor | None) -> str:
    """Return what is wrong with what the norm made of a C, or "".

    With v and u the roundoffs of fp32 and of the result, a mean square of n columns is off by at most n v of itself,
    its root by half of that, and the few operations behind it by v each; the result is rounded to u of itself, or in
    fp8 to half of the spacing of subnormals. Scales are of the row's largest element.
    """
    c = c.double()
    expected = c * (c.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
    info = torch.finfo(normed.dtype)
    relative = info.eps / 2 + (c.shape[1] / 2 + 8) * FP32_ROUNDOFF
    values, least = normed.to(torch.float64), info.smallest_normal * info.eps / 2
    if scales is not None:
        largest = expected.abs().amax(1, keepdim=True) / info.max
        if not torch.allclose(scales.double(), largest, rtol=(c.shape[1] + 8) * FP32_ROUNDOFF, atol=0.0):
            return f"scales are {scales.tolist()}, expected {largest.tolist()}"
        values, least = values * scales.double(), least * scales.double()
    outside = ~((values - expected).abs() <= relative * expected.abs() + least)
    return f"{int(outside.sum())} of {outside.numel()} normed elements are off" if outside.any() else ""


def poison_kept(operator: Any) -> None:
    """Fill what an operator keeps its outputs in, so that an element that is not written cannot pass."""
    for output in operator.outputs():
        output.view(torch.uint8).fill_(0xFF) if output.dtype == FP8 else output.fill_(float("nan"))


def run(rank: int, world_size: int, family: str, variant: str, dtype: torch.dtype, normed_dtype: Any) -> list[str]:
    """Call an operator with a residual and a norm, twice for the same data; return what was wrong."""
    ctx, faults, epilogue = context(), [], ("bias", "residual")
    for m, n, k in SIZES:
        norm = RmsNorm(EPS, normed_dtype)
        problem = replace(make_problem(family, m, n, k, world_size, dtype), epilogue=epilogue, norm=norm)
        operator = get_variant(family, variant).build(ctx, problem)
        operands, weight = own_operands(family, problem, rank), weight_of(n, dtype)
        data = make_data(family, problem, rank, seed=m, device=ctx.get_device())
        answers = []
        for _ in range(2):
            poison_kept(operator)
            ctx.barrier()
            outputs = operator.call(data.a, data.b, **operands, norm_weight=weight)
            answers.append([one.contiguous().clone() for one in outputs])
        c, normed, *scales = answers[0]
        if wrong := fault(c, finished_data(data, family, problem, rank), dtype):
            faults.append(f"{m}x{n}x{k}: C: {wrong}")
        if c.numel() and (wrong := normed_fault(c, weight, normed, scales[0] if scales else None)):
            faults.append(f"{m}x{n}x{k}: {wrong}")
        if any(one.view(torch.uint8).ne(other.view(torch.uint8)).any() for one, other in zip(*answers, strict=True)):
            faults.append(f"{m}x{n}x{k}: the bits differ between two calls")
        operator.close()
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("world_size", "dtype", "normed_dtype"),
    [(3, torch.float32, None), (2, torch.bfloat16, None), (3, torch.bfloat16, FP8), (1, torch.float16, FP8)],
)
@pytest.mark.parametrize("variant", KERNELS, ids=name)
def test_every_variant_norms_rows(
    ranks: Callable[[int], Ranks], variant: Variant, world_size: int, dtype: torch.dtype, normed_dtype: Any
) -> None:
    found = ranks(world_size).call(run, variant.family, variant.name, dtype, normed_dtype)
    assert found == [[]] * world_size
