"""Operands for operators and the check of every element of an output, on a rank.

An error is allowed what rounding allows. With u the unit roundoff of the output's dtype and v = 2**-24 that of fp32, in
which products are summed, a sum of k products is off by at most ``(k + 1) * v * (|A| @ |B|)`` in any order, and by
``u * |C|`` more once it is rounded to the dtype; partial sums that are rounded to travel add ``u * (|A| @ |B|)``. In
the norm, an output of many elements must be as good as the library's in that dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from families import FAMILIES

FP32_ROUNDOFF = 2.0**-24
AS_GOOD_AS = 1.5  # times the library's error
FEW = 1000  # elements: of fewer, the library's may be lucky


@dataclass(frozen=True)
class Data:
    """One call's operands on one rank, those of fp8 with scales (scaled.py), and what the call must give."""

    a: torch.Tensor
    b: torch.Tensor
    expected: torch.Tensor
    bound: torch.Tensor
    library_error: float
    summing_error: float
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)


def make_data(family: str, problem: Any, rank: int, seed: int, device: torch.device, *, layout: str = "nk") -> Data:
    """Draw the whole A and B from a seed, the same on every rank, and take this rank's parts.

    `layout` is how B lies in memory: "kn" by rows, "nk" by columns; with "strided" neither A nor B is contiguous.
    """
    shards = FAMILIES[family]
    draw = _draw_whole if device.type == "cpu" else _draw_whole.__wrapped__  # a GPU's are large and soon drawn
    whole = draw(family, problem, seed, device)
    own_a = shards.own_a(problem, rank, whole.a).clone(memory_format=torch.contiguous_format)
    own_b = shards.own_b(problem, rank, whole.b).clone(memory_format=torch.contiguous_format)
    own_a, own_b = laid_out(own_a, own_b, layout)
    expected = shards.own_output(problem, rank, whole.product)
    library_error = _relative(shards.own_output(problem, rank, whole.library).to(expected.dtype), expected)
    # Two orders of summation in fp32 differ by so much; beside the rounding to a narrower dtype it is nothing.
    summing_error = math.sqrt(problem.k) * FP32_ROUNDOFF
    return Data(own_a, own_b, expected, shards.own_output(problem, rank, whole.bound), library_error, summing_error)


@dataclass(frozen=True)
class _Whole:
    """What the ranks have parts of; `library` is A @ B as the library computes it. Calls share it: nobody writes it."""

    a: torch.Tensor
    b: torch.Tensor
    product: torch.Tensor
    bound: torch.Tensor
    library: torch.Tensor


@functools.lru_cache(maxsize=4)  # ranks in one process, and variants of one family, ask for the same
def _draw_whole(family: str, problem: Any, seed: int, device: torch.device) -> _Whole:
    shards = FAMILIES[family]
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(problem.dtype)

    a, b = draw(problem.m, problem.k), draw(problem.k, problem.n)
    # On a GPU fp32 is enough, and quick, for outputs that are rounded to less.
    wide = torch.float64 if device.type == "cpu" or problem.dtype == torch.float32 else torch.float32
    product = a.to(wide) @ b.to(wide)
    sums = a.abs().to(wide) @ b.abs().to(wide)
    output = torch.finfo(problem.out_dtype)
    roundoff, tiny = output.eps / 2, output.smallest_normal * output.eps
    summing = (
        (problem.k + problem.world_size) * FP32_ROUNDOFF * (1 if wide == torch.float64 else 2)
    )  # the reference's too
    bound = roundoff * product.abs() + summing * sums + tiny
    if shards.sums_partials:
        bound += roundoff * sums
        partials = [
            _multiply(shards.own_a(problem, peer, a), shards.own_b(problem, peer, b))
            for peer in range(problem.world_size)
        ]
        library = functools.reduce(torch.add, partials)
    else:
        library = _multiply(a, b)
    return _Whole(a, b, product, bound, library)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A @ B as the library does: summed in fp32 and rounded once."""
    if a.device.type == "cpu":  # where torch's for narrow dtypes, which does the same, may take 70 times as long
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def fault(output: torch.Tensor, data: Data, dtype: torch.dtype) -> str | None:
    """Return what is wrong with an output, or None."""
    expected = data.expected
    if output.shape != expected.shape or output.dtype != dtype:
        return f"the output is {tuple(output.shape)} of {output.dtype}, expected {tuple(expected.shape)} of {dtype}"
    values = output.to(expected.dtype)
    outside = ~((values - expected).abs() <= data.bound)  # NaN is outside
    if outside.any():
        first = tuple(outside.nonzero()[0].tolist())
        return (
            f"{int(outside.sum())} of {outside.numel()} elements are off; first {first}: "
            f"{values[first].item()}, expected {expected[first].item()} within {data.bound[first].item():.2g}"
        )
    error = _relative(values, expected)
    if expected.numel() >= FEW and error > AS_GOOD_AS * data.library_error + data.summing_error:
        return f"the error is {error:.3g} of the norm; the library's is {data.library_error:.3g}"
    return None


def poison(operator: Any) -> None:
    """Fill an operator's output with NaN, so that an element that is not written cannot pass."""
    if hasattr(operator, "output"):  # a baseline has no buffer that peers write
        operator.output.fill_(float("nan"))


def laid_out(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous operands as a layout of `make_data` has them."""
    if layout == "nk":
        return a, b.t().contiguous().t()
    return (_strided(a), _strided(b)) if layout == "strided" else (a, b)


def _strided(matrix: torch.Tensor) -> torch.Tensor:
    """Return the same matrix with gaps between its elements, in both dimensions."""
    rows, columns = matrix.shape
    wide = torch.full((rows + 1, 2 * columns), float("nan"), dtype=matrix.dtype, device=matrix.device)
    wide[:rows, ::2] = matrix
    return wide[:rows, ::2]


def _relative(values: torch.Tensor, expected: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm
    return (norm(values - expected) / norm(expected)).item() if expected.numel() else 0.0
