"""Whether an output is right: every element, against a wide reference, as tightly as the dtype's rounding allows.

An output passes if all of it is finite, and both of these hold, where u is the dtype's unit roundoff, 2⁻²⁴ that of the
accumulator, K the length of the sums, and T the number of ranks whose parts are added up (1 but for reduce-scatter):

- in the norm: ‖out − ref‖ / ‖ref‖ is at most 1.5 times that of torch.mm in the same dtype on the same data (of the T
  products added up in that dtype), plus √K·2⁻²⁴ (two orders of summation differ by that) plus 2u/√elements (one of few
  elements may round luckily);
- element by element: |out − ref| ≤ 2T·u·(|ref| + s) + u·p + 4·√K·2⁻²³·‖a_i‖·‖b_j‖ + one subnormal, where ‖a_i‖ and
  ‖b_j‖ are the norms of the row of A and the column of B, s = ‖a_i‖·‖b_j‖/√K is the size of a typical element, and p
  the sum of the partials' magnitudes (0 where T is 1). The first two terms are the rounding to the dtype, of the result
  and of partial results, which p bounds also where large partials cancel; the third is the rounding of a sum of K
  products in fp32, which grows as √K with a probability close to one (Higham and Mary, "A new approach to probabilistic
  rounding error analysis", 2019), doubled for tensor cores, which truncate.

Tensor cores of sm_90 align 32 products of fp8 and the sum so far with the largest of them, and cut off what is below 13
fraction bits (DeepSeek-V3, arXiv 2412.19437, section 3.5.2): simulated so, products have the errors measured on an H200
to 1 %. With fast accumulation each of the K/T products of a sum is so truncated once, by less than 2⁻¹³ of that sum,
with its sign: by 2⁻¹³/√3 of it in the mean square. The sum grows as √k to s; in the mean square over k, it is half of
s². Added up, that is c = √(K/6T)·2⁻¹³ of s, twice or more of what random operands give. Sums that are promoted begin
anew after P = 128 products, and are √(P·T/K) as large: K·T⁻¹·P⁻¹ such errors add up to c = √(P/6)·2⁻¹³ of s. The norm's
bound is larger by c; that of an element by 4c·(p + s), where p is |ref| if T is 1: the sum is as large as p at last, at
least.

Where the problem has an epilogue, it is applied to the reference, and to what torch.mm gives; the bounds are larger by
what its ops make of an error.

With random data in a 2-byte dtype, a wrong element is typically off by a hundred times this bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from iris_kernels.common.problem import wide_dtype

from .families import Block

LIBRARY_FACTOR = 1.5
_ACCUMULATOR_ROUNDOFF = 2.0**-24
_FP8_ACCUMULATOR_ULP = 2.0**-13


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Args:
        error: ‖out − ref‖ / ‖ref‖; infinite where an element is not finite.
        correct: whether the output passes.
        reason: what is wrong with it; empty if it passes.
    """

    error: float
    correct: bool
    reason: str = ""


class _Part:
    """A block's reference and bound."""

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        self.rows, self.columns = block.rows, block.columns
        self._k = sum(a.shape[1] for a, _ in block.terms)
        self._num_terms = len(block.terms)
        longest = max(a.shape[1] for a, _ in block.terms)
        self._truncation = math.sqrt(min(longest, block.truncated_k) / 6) * _FP8_ACCUMULATOR_ULP
        wide = wide_dtype(dtype, block.terms[0][0].device)
        squared_a: Any = 0
        squared_b: Any = 0
        narrow: Any = 0
        reference: Any = 0
        partials: Any = 0
        for a, b in block.terms:
            product = torch.mm(a, b)
            narrow = (product if block.dtype is None else product.to(block.dtype)) + narrow
            a, b = a.to(wide), b.to(wide)
            product = a @ b
            reference = reference + product
            if self._num_terms > 1 or self._truncation:
                partials = partials + product.abs()
            squared_a = squared_a + a.square().sum(1, keepdim=True)
            squared_b = squared_b + b.square().sum(0, keepdim=True)
        self.reference: torch.Tensor = block.finish(reference)
        self._slope = block.slope
        self.squared_error = _squared_norm(block.finish(narrow).to(dtype).to(wide) - self.reference)
        self._partials = partials  # the sum of their magnitudes; 0 where it is not needed
        self._a_norms, self._b_norms = squared_a.sqrt(), squared_b.sqrt()

    @property
    def summation(self) -> float:
        """How far the whole may be from the reference, relatively, by the order and the precision of its sums."""
        return math.sqrt(self._k) * _ACCUMULATOR_ROUNDOFF + self._truncation

    def bound(self, dtype: torch.dtype) -> torch.Tensor:
        """How far each element may be from the reference."""
        rounding, info = 2 * self._num_terms * _roundoff(dtype), torch.finfo(dtype)
        summation, truncation = 4 * math.sqrt(self._k) * 2 * _ACCUMULATOR_ROUNDOFF, 4 * self._truncation
        scale = self._a_norms * self._b_norms * (summation + (rounding + truncation) / math.sqrt(self._k))
        of_partials = truncation + (_roundoff(dtype) if self._num_terms > 1 else 0.0)
        scale = (scale + self._partials * of_partials) * self._slope
        return scale.add_(self.reference.abs(), alpha=rounding).add_(info.smallest_normal * info.eps)


class Expectation:
    """What one call must give on one rank.

    Args:
        blocks: the parts of the output and their operands.
        shape: of the whole output.
        dtype: of the output.
    """

    def __init__(self, blocks: Iterable[Block], *, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        parts = [_Part(block, dtype) for block in blocks]
        self._device = parts[0].reference.device
        self._parts = [part for part in parts if part.reference.numel()]
        elements = sum(part.reference.numel() for part in self._parts)
        assert elements == math.prod(shape), f"the blocks have {elements} elements, the output {shape}"
        self._norm = math.sqrt(sum(_squared_norm(part.reference) for part in self._parts))
        self.library_error = self._relative(sum(part.squared_error for part in self._parts))
        luck = 2 * _roundoff(dtype) / math.sqrt(max(elements, 1))
        summation = max((part.summation for part in self._parts), default=0.0)
        self.tolerance = LIBRARY_FACTOR * self.library_error + luck + summation

    def judge(self, output: torch.Tensor) -> Verdict:
        """Return whether an output is what was expected."""
        if tuple(output.shape) != self.shape or output.dtype != self.dtype:
            return Verdict(math.inf, False, f"the output is {tuple(output.shape)} of {output.dtype}, not {self.shape}")
        squared_error, not_finite, outside, example = 0.0, 0, 0, ""
        for part in self._parts:
            values = output[part.rows, part.columns].to(part.reference.dtype)
            deviation = (values - part.reference).abs_()
            squared_error += _squared_norm(deviation)
            not_finite += int((~torch.isfinite(values)).sum())
            # Not deviation > bound: with a NaN, every comparison is false.
            bad = ~(deviation <= part.bound(self.dtype))
            count = int(bad.sum())
            if count and not example:
                example = _describe(bad, values, part)
            outside += count
        error = self._relative(squared_error) if not_finite == 0 else math.inf
        if outside:
            nan = f", {not_finite} of them not finite" if not_finite else ""
            total = math.prod(self.shape)
            return Verdict(error, False, f"{outside} of {total} elements are wrong{nan}; the first is {example}")
        if error > self.tolerance:
            limit = f"{self.tolerance:.2e} (torch.mm: {self.library_error:.2e})"
            return Verdict(error, False, f"relative error {error:.2e} is above {limit}")
        return Verdict(error, True)

    def elements(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole reference, and how far each element of an output may be from it."""
        reference = torch.zeros(self.shape, dtype=wide_dtype(self.dtype, self._device), device=self._device)
        bound = torch.zeros_like(reference)
        for part in self._parts:
            reference[part.rows, part.columns] = part.reference
            bound[part.rows, part.columns] = part.bound(self.dtype)
        return reference, bound

    def _relative(self, squared_error: float) -> float:
        return math.sqrt(squared_error) / self._norm if self._norm else 0.0


def _describe(bad: torch.Tensor, values: torch.Tensor, part: _Part) -> str:
    row, column = divmod(int(bad.flatten().to(torch.uint8).argmax()), bad.shape[1])
    value, expected = values[row, column].item(), part.reference[row, column].item()
    row, column = row + (part.rows.start or 0), column + (part.columns.start or 0)
    return f"at row {row}, column {column}: {value:.6g} instead of {expected:.6g}"


def _squared_norm(matrix: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
