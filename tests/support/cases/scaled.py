"""Quantised operands with their scales for operators, on a rank, and what a call on them must give.

Products of two fp8 numbers are exact in fp32. So the bound of `checking` holds, with what two scales add: with
v = 2**-24 a sum of k products, scaled, is off by at most ``(k + 3) * v * (|A| @ |B|)``, of the dequantised A and B.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from checking import FP32_ROUNDOFF, Data
from families import FAMILIES

from iris_kernels.common.scales import SCALE_BLOCK, scale_shapes

KINDS = (("tensor", "tensor"), ("row", "column"), ("tensor", "column"), ("block", "block"))


class Quantised(NamedTuple):
    """A matrix in fp8, its scale, and in fp64 what they stand for."""

    matrix: torch.Tensor
    scale: torch.Tensor
    whole: torch.Tensor


def quantised(matrix: torch.Tensor, dtype: torch.dtype, kind: str, scale_shape: tuple[int, ...]) -> Quantised:
    """Return a matrix in fp8: the largest of what shares a scale is the largest of the format."""
    rows, columns = matrix.shape
    high, wide = {
        "tensor": (max(1, rows), max(1, columns)),
        "row": (1, max(1, columns)),
        "column": (max(1, rows), 1),
        "block": (1 if scale_shape[0] == rows else SCALE_BLOCK, SCALE_BLOCK),
    }[kind]
    scale = torch.ones(scale_shape)
    most = torch.finfo(dtype).max
    for row, column in ((row, column) for row in range(scale_shape[0]) for column in range(scale_shape[1])):
        part = matrix[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
        if part.numel():
            scale[row, column] = part.abs().max() / most
    spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    small = (matrix / spread).clamp(-most, most).to(dtype)
    return Quantised(small, scale, small.double() * spread.double())


class ScaledData(NamedTuple):
    """A call's operands on one rank, and what the call must give."""

    a: torch.Tensor
    b: torch.Tensor
    scales: dict[str, torch.Tensor]
    data: Data


@functools.lru_cache(maxsize=4)
def make_scaled_data(family: str, problem: Any, rank: int, seed: int) -> ScaledData:
    """Draw the whole A and B from a seed, the same on every rank, and quantise each rank's parts by themselves."""
    shards, draw = FAMILIES[family], torch.Generator().manual_seed(seed)
    whole_a, whole_b = (
        torch.randn(*shape, generator=draw) for shape in ((problem.m, problem.k), (problem.k, problem.n))
    )
    # Ranks, rows and columns of different sizes: another's scale would be seen.
    whole_a *= 1 + torch.arange(problem.m)[:, None] % 5
    whole_b *= 1 + torch.arange(problem.n)[None, :] % 3
    parts, partials = [], []
    wide_a, wide_b = torch.zeros(whole_a.shape).double(), torch.zeros(whole_b.shape).double()
    for peer in range(problem.world_size):
        own_a, own_b = shards.own_a(problem, peer, whole_a), shards.own_b(problem, peer, whole_b)
        shapes = scale_shapes(problem.scales, tuple(own_a.shape), tuple(own_b.shape))
        of_a, of_b = problem.scales or ("tensor", "tensor")
        a = quantised(own_a, problem.dtype, of_a, shapes.get("a_scale", (1, 1)))
        b = quantised(own_b, problem.b_dtype, of_b, shapes.get("b_scale", (1, 1)))
        shards.own_a(problem, peer, wide_a).copy_(a.whole)
        shards.own_b(problem, peer, wide_b).copy_(b.whole)
        partials.append((a.whole @ b.whole).to(problem.dtype_of_partials) if shards.sums_partials else None)
        parts.append((a, b))
    product, sums = wide_a @ wide_b, wide_a.abs() @ wide_b.abs()
    out, partial = (torch.finfo(dtype) for dtype in (problem.out_dtype, problem.dtype_of_partials))
    bound = out.eps / 2 * product.abs() + (problem.k + problem.world_size + 3) * FP32_ROUNDOFF * sums
    bound += out.smallest_normal * out.eps
    library = product.to(problem.out_dtype)
    if shards.sums_partials:
        bound += partial.eps / 2 * sums
        library = functools.reduce(torch.add, partials).to(problem.out_dtype)
    norm = torch.linalg.vector_norm
    library_error = float(norm(library.double() - product) / norm(product))
    a, b = parts[rank]
    own = {"a_scale": a.scale, "b_scale": b.scale} if problem.scales else {}
    data = Data(
        a.matrix,
        b.matrix.t().contiguous().t(),
        shards.own_output(problem, rank, product),
        shards.own_output(problem, rank, bound),
        library_error,
        math.sqrt(problem.k) * FP32_ROUNDOFF,
    )
    return ScaledData(data.a, data.b, own, data)
