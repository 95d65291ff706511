"""Rows in fp8 by a kernel, and by torch's operations in graphs: the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks, context

from iris_kernels.common.fp8.quantise import _quantise_with_torch, quantise_rows
from iris_kernels.common.fp8.scales import quantise


def quantise_alike(rank: int, world_size: int, wide: torch.dtype, dtype: torch.dtype, given: float | None) -> list[int]:
    """Return of which matrices the kernel and torch's operations make different ones, or such as are not contiguous.

    On a GPU, different from what torch makes on the CPU, too.
    """
    device = context().get_device()  # by whose interpreter fp8 is rounded
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(37, 300, generator=draw) * torch.logspace(-3, 3, 37)[:, None]).to(wide)
    x[3], x[5, 2] = 0.0, torch.nan
    x, wrong = x.to(device), []
    scale = None if given is None else torch.tensor(given, device=device)
    for number, matrix in enumerate((x, x.t().contiguous().t(), x[:, ::3], x[:1], x[:, :1], x[:0])):
        made = [quantise_rows(matrix, dtype, scale), _quantise_with_torch(matrix, dtype, scale)]
        if given is None and matrix.numel():
            made += [quantise(matrix, dtype, "row"), quantise(matrix.cpu(), dtype, "row")]
        (small, own), *others = made
        is_right = all(one.is_contiguous() for one, _ in made)
        for one, other in others:
            is_right &= torch.equal(small.view(torch.uint8).cpu(), one.view(torch.uint8).cpu())
            is_right &= torch.equal(own.cpu(), other.cpu())
        if not is_right:
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("given", [None, 0.01], ids=["by row", "given"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernel_and_torch_quantise_rows_alike(
    ranks: Callable[[int], Ranks], wide: torch.dtype, dtype: torch.dtype, given: float | None
) -> None:
    assert ranks(1).call(quantise_alike, wide, dtype, given) == [[]]
