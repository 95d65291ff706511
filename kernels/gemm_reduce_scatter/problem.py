"""GEMM + reduce-scatter: sizes, shards, bytes on the wire, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.operators.product import Product
from ..common.problem import Problem, Shapes, shard_bounds


@dataclass(frozen=True)
class GemmReduceScatterProblem(Problem):
    """C (m, n) = A (m, k) @ B (k, n): A and B are cut along k, C by rows.

    A rank multiplies its slices of k, which gives a partial C, and receives its rows of the sum over ranks.

    Args:
        m: rows of A, whole on every rank, and of C over all ranks, of which a rank gets ``ceil(m / world_size)`` or
            fewer.
        n: columns of B and of C, whole on every rank.
        k: columns of A and rows of B over all ranks, of which a rank holds ``ceil(k / world_size)`` or fewer.
        world_size, dtype, epilogue, out_dtype, b_dtype, scales, partial_dtype, use_fast_accum, norm: as of `Problem`.
        a_dtype: None, or `dtype`: no A travels that could be quantised.

    Raises:
        ValueError: as of `Problem`.
    """

    allows_norm: ClassVar[bool] = True

    @classmethod
    def from_shapes(cls, a_shapes: Shapes, b_shapes: Shapes, dtype: torch.dtype) -> GemmReduceScatterProblem:
        """See `Problem.from_shapes`: the slices of k add up."""
        return cls(a_shapes[0][0], b_shapes[0][1], sum(k for _, k in a_shapes), len(a_shapes), dtype)

    def inner(self, rank: int) -> tuple[int, int]:
        """Return which slice of k, from and without, a rank holds."""
        return shard_bounds(self.k, self.world_size, rank)

    def rows(self, rank: int) -> tuple[int, int]:
        """Return which rows of C, from and without, a rank receives."""
        return shard_bounds(self.m, self.world_size, rank)

    def a_shape(self, rank: int) -> tuple[int, int]:
        """(m, the rank's slice of k)."""
        start, stop = self.inner(rank)
        return self.m, stop - start

    def b_shape(self, rank: int) -> tuple[int, int]:
        """(the rank's slice of k, n)."""
        return self.a_shape(rank)[1], self.n

    def shard_shape(self, rank: int) -> tuple[int, int]:
        """(the rank's rows, n): the shard of C that it sums."""
        start, stop = self.rows(rank)
        return stop - start, self.n

    def c_bounds(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rank's rows, and all columns."""
        return self.rows(rank), (0, self.n)

    def shards(self, rank: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Problem.shards`."""
        inner = slice(*self.inner(rank))
        return a[:, inner], b[inner]

    @property
    def wire_bytes(self) -> int:
        """What a rank receives at most: the peers' parts of the largest shard, in the dtype of partial sums."""
        return (self.world_size - 1) * self.shard_shape(0)[0] * self.n * self.dtype_of_partials.itemsize


def gradients(
    product: Product, a: torch.Tensor, b: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`.

    C's is gathered, once, for both.
    """
    sizes = product.m, product.k, product.n
    of_a, whole = product.backward("all_gather_gemm", grad, [one.t() for one in b], *sizes, keep_gathered=True)
    return of_a if wanted[0] else None, a.t() @ whole if wanted[1] else None
