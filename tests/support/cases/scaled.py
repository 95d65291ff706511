"""Quantised operands with their scales for operators, on a rank, and what a call on them must give.

Products of two fp8 numbers are exact in fp32. So the bound of `checking` holds, with what two scales add: with
v = 2**-24 a sum of k products, scaled, is off by at most ``(k + 3) * v * (|A| @ |B|)``, of the dequantised A and B.
Tensor cores of sm_90 cut off of 32 products, and the sum so far, what is below 13 bits of the largest
(bench/measure/correctness.py): on GPUs the bound is larger by ``2**-13 * (|A| @ |B|)``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from checking import FP32_ROUNDOFF, Data, laid_out, make_data
from families import FAMILIES

from iris_kernels.common.fp8.scales import SCALE_BLOCK, quantise

TENSOR_CORE_ROUNDOFF = 2.0**-13
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
KINDS = (("tensor", "tensor"), ("row", "column"), ("tensor", "column"), ("block", "block"))


class ScaledData(NamedTuple):
    """A call's operands on one rank, and what the call must give."""

    a: torch.Tensor
    b: torch.Tensor
    scales: dict[str, torch.Tensor]
    data: Data


@functools.lru_cache(maxsize=4)
def make_scaled_data(
    family: str, problem: Any, rank: int, seed: int, device: torch.device = CPU, layout: str = "nk"
) -> ScaledData:
    """Draw the whole A and B from a seed, the same on every rank, and quantise each rank's parts by themselves.

    Layouts are those of `make_data`.
    """
    shards, draw = FAMILIES[family], torch.Generator().manual_seed(seed)
    whole_a, whole_b = (
        torch.randn(*shape, generator=draw).to(device) for shape in ((problem.m, problem.k), (problem.k, problem.n))
    )
    # Ranks, rows and columns of different sizes: another's scale would be seen.
    whole_a *= 1 + torch.arange(problem.m, device=device)[:, None] % 5
    whole_b *= 1 + torch.arange(problem.n, device=device)[None, :] % 3
    parts, partials = [], []
    wide_a, wide_b = (torch.zeros_like(whole, dtype=torch.float64) for whole in (whole_a, whole_b))
    for peer in range(problem.world_size):
        own_a, own_b = shards.own_a(problem, peer, whole_a), shards.own_b(problem, peer, whole_b)
        a, a_scale = quantise(own_a, problem.dtype, problem.scales[0])
        b, b_scale = quantise(own_b, problem.b_dtype, problem.scales[1], is_b=True)
        own = [one.double() * _spread(scale, one) for one, scale in ((a, a_scale), (b, b_scale))]
        shards.own_a(problem, peer, wide_a).copy_(own[0])
        shards.own_b(problem, peer, wide_b).copy_(own[1])
        partials.append((own[0] @ own[1]).to(problem.dtype_of_partials) if shards.sums_partials else None)
        parts.append((a, b, {"a_scale": a_scale, "b_scale": b_scale}))
    product, sums = wide_a @ wide_b, wide_a.abs() @ wide_b.abs()
    out, partial = (torch.finfo(dtype) for dtype in (problem.out_dtype, problem.dtype_of_partials))
    bound = out.eps / 2 * product.abs() + (problem.k + problem.world_size + 3) * FP32_ROUNDOFF * sums
    bound += out.smallest_normal * out.eps
    if device.type == "cuda":
        bound += TENSOR_CORE_ROUNDOFF * sums
    library = product.to(problem.out_dtype)
    if shards.sums_partials:
        bound += partial.eps / 2 * sums
        library = functools.reduce(torch.add, partials).to(problem.out_dtype)
    norm = torch.linalg.vector_norm
    library_error = float(norm(library.double() - product) / norm(product))
    a, b, scales = parts[rank]
    data = Data(
        *laid_out(a, b, layout),
        shards.own_output(problem, rank, product),
        shards.own_output(problem, rank, bound),
        library_error,
        math.sqrt(problem.k) * FP32_ROUNDOFF,
        scales,
    )
    return ScaledData(data.a, data.b, scales, data)


def make_any_data(family: str, problem: Any, rank: int, seed: int, device: torch.device, *, layout: str = "nk") -> Data:
    """Return a call's operands, as `make_scaled_data` makes those of a problem with scales, `make_data` others."""
    if problem.scales:
        return make_scaled_data(family, problem, rank, seed, device, layout).data
    return make_data(family, problem, rank, seed, device, layout=layout)


def _spread(scale: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return in fp64 the scale of each element of a matrix."""
    for dim in (0, 1):
        if scale.shape[dim] not in (1, matrix.shape[dim]):
            scale = scale.repeat_interleave(SCALE_BLOCK, dim).narrow(dim, 0, matrix.shape[dim])
    return scale.double().expand(matrix.shape)
