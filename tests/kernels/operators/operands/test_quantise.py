"""Quantised matrices have scales of the shapes that operators take, and stand for what they were made of."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from compiling import compile_kernel
from ranks import Pools, context

from iris_kernels.common.fp8.scales import SCALE_BLOCK, dequantised, kinds_of, quantise, scale_shapes
from iris_kernels.common.portable import quantise as kernels


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


def awkward_rows(columns: int, dtype: torch.dtype, is_transposed: bool) -> torch.Tensor:
    """Return rows of very different sizes: one of zeros, one too small for a scale, others with inf or NaN."""
    rows = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns))
    rows *= 10.0 ** torch.arange(-4, 5)[:, None]
    rows[1], rows[2] = 0.0, 1e-38
    rows[4, 0], rows[5, columns // 2], rows[6, -1] = torch.nan, torch.inf, -torch.inf
    rows = rows.to(dtype)
    return rows.t().contiguous().t() if is_transposed else rows


def quantise_with_kernel(rank: int, world_size: int) -> list[str]:
    """Return on which rows the kernel and torch differ in a bit."""
    context()  # whose interpreter rounds as GPUs do
    wrong, dtype = [], torch.float8_e4m3fn
    for given in (torch.bfloat16, torch.float16, torch.float32):
        for columns in (1, 7, 64, 700):  # the last three times 256, which are in registers at once
            matrix = awkward_rows(columns, given, is_transposed=columns == 7)
            room, scales = torch.zeros(9, columns + 3).to(dtype)[:, :columns], torch.full((9, 1), torch.nan)
            with mock.patch.object(kernels, "ELEMENTS_OF_A_THREAD", 1):
                arguments = kernels.quantise_arguments(matrix, room, scales)
            kernels.quantise_rows[(9,)](**arguments)
            expected, of_rows = quantise(matrix, dtype, "row")
            same = torch.equal(room.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scales, of_rows)
            wrong += [] if same else [f"{given}, {columns} columns"]
    return wrong


def test_the_kernel_gives_what_torch_gives_bit_for_bit(pools: Pools) -> None:
    assert pools.ranks(2, "cpu").call(quantise_with_kernel) == [[], []]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_a_row_that_is_no_numbers_makes_its_product_nan(dtype: torch.dtype) -> None:
    matrix = awkward_rows(16, torch.float32, is_transposed=False)
    wide = dequantised(*quantise(matrix, dtype, "row"))
    for row, are_nan in enumerate((matrix @ torch.ones(16)).isfinite().logical_not()):
        assert bool((wide @ torch.ones(16, 2))[row].isnan().all()) == bool(are_nan)
    assert torch.equal(wide[1], torch.zeros(16))


@pytest.mark.parametrize(("target", "dtype"), [("sm_90", torch.float8_e4m3fn), ("gfx942", torch.float8_e4m3fnuz)])
@pytest.mark.parametrize("columns", [8192, 28672])
@pytest.mark.parametrize("is_given", [False, True])
def test_the_kernel_reads_and_writes_vectors_and_spills_nothing(
    target: str, dtype: torch.dtype, columns: int, is_given: bool
) -> None:
    matrix = torch.zeros(4, columns, dtype=torch.bfloat16)
    arguments = kernels.quantise_arguments(matrix, matrix.to(dtype), torch.zeros(1 if is_given else (4, 1)))
    compiled = compile_kernel(kernels.quantise_rows, {**arguments, "num_warps": kernels.QUANTISE_WARPS}, target)
    assert compiled.scratch_bytes == 0
    assert max(compiled.stores_by_file()["quantise.py"]) >= 8
