"""Quantised matrices have scales of the shapes that operators take, and stand for what they were made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks, context

from iris_kernels.common.quantise import _quantise_with_torch, quantise_rows
from iris_kernels.common.scales import SCALE_BLOCK, dequantised, kinds_of, quantise, scale_shapes


@pytest.mark.parametrize("shapes", [((5, 300), (300, 140)), ((0, 7), (7, 1)), ((3, 128), (128, 0))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("row", "column"), ("block", "block")], ids="-".join)
def test_scales_are_of_what_they_are_said_to_be(
    kinds: tuple[str, str], dtype: torch.dtype, shapes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=draw) * (1 + torch.arange(shape[0])[:, None]) for shape in shapes]
    pairs = [
        quantise(one, dtype, kind, is_b=bool(index)) for index, (one, kind) in enumerate(zip(whole, kinds, strict=True))
    ]
    expected = scale_shapes(kinds, *shapes)
    assert [tuple(scale.shape) for _, scale in pairs] == [expected["a_scale"], expected["b_scale"]]
    for one, (small, scale), kind in zip(whole, pairs, kinds, strict=True):
        assert small.dtype == dtype
        if not one.numel():
            continue
        # Rounded to nearest; of what is far less than the largest, to the least of the format.
        error, info = (dequantised(small, scale) - one).abs(), torch.finfo(dtype)
        assert bool((error <= info.eps * one.abs() + info.smallest_normal / info.max * one.abs().max()).all())
        if kind == "row":
            assert torch.equal(scale[:, 0], one.abs().amax(1) / torch.finfo(dtype).max)


def test_kinds_are_told_by_shapes() -> None:
    a, b = (5, 300), (300, 140)
    assert kinds_of(a, b, None, None) == ()
    assert kinds_of(a, b, (), (1,)) == ("tensor", "tensor")
    assert kinds_of(a, b, (5, 1), ()) == ("row", "tensor")
    assert kinds_of(a, b, (), (1, 140)) == ("tensor", "column")
    assert kinds_of(a, b, (5, 3), (3, 2)) == ("block", "block")
    # In one block of k, scales of rows and of blocks have one shape: those of columns tell them apart.
    assert kinds_of((5, SCALE_BLOCK), (SCALE_BLOCK, 140), (5, 1), (1, 2)) == ("block", "block")


def quantise_alike(rank: int, world_size: int, wide: torch.dtype, dtype: torch.dtype, given: float | None) -> list[int]:
    """Return of which matrices the kernel and torch's operations make different ones, or such as are not contiguous."""
    context()  # by which the interpreter rounds to fp8
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(37, 300, generator=draw) * torch.logspace(-3, 3, 37)[:, None]).to(wide)
    x[3] = 0.0
    scale, wrong = None if given is None else torch.tensor(given), []
    for number, matrix in enumerate((x, x.t().contiguous().t(), x[:, ::3], x[:1], x[:, :1], x[:0])):
        made = [quantise_rows(matrix, dtype, scale), _quantise_with_torch(matrix, dtype, scale)]
        if given is None and matrix.numel():
            made.append(quantise(matrix, dtype, "row"))
        (small, own), *others = made
        is_right = all(one.is_contiguous() for one, _ in made)
        for one, other in others:
            is_right &= torch.equal(small.view(torch.uint8), one.view(torch.uint8)) and torch.equal(own, other)
        if not is_right:
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("given", [None, 0.01], ids=["by row", "given"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernel_and_torch_quantise_rows_alike(
    ranks: Callable[[int], Ranks], wide: torch.dtype, dtype: torch.dtype, given: float | None
) -> None:
    assert ranks(1).call(quantise_alike, wide, dtype, given) == [[]]
