"""GEMM + all-scatter: sizes, shards, bytes on the wire, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from iris_core.context import context_named

from ..common.operators.product import Product
from ..common.problem import Problem, Shapes, shard_bounds


@dataclass(frozen=True)
class GemmAllScatterProblem(Problem):
    """C (m, n) = A (m, k) @ B (k, n): A is replicated, B cut by columns, C whole on every rank.

    A rank computes its block of columns of C and every rank receives it.

    Args:
        m: rows of A and of C, whole on every rank.
        n: columns of B over all ranks, of which a rank holds ``ceil(n / world_size)`` or fewer; and those of C.
        k: columns of A and rows of B, whole on every rank.
        world_size, dtype, epilogue, out_dtype, b_dtype, scales, use_fast_accum: as of `Problem`.
        partial_dtype: without effect: no partial sums travel.
        norm: None: ranks sum no whole rows of C.
        a_dtype: None, or `dtype`: no A travels that could be quantised.

    Raises:
        ValueError: as of `Problem`.
    """

    @classmethod
    def from_shapes(cls, a_shapes: Shapes, b_shapes: Shapes, dtype: torch.dtype) -> GemmAllScatterProblem:
        """See `Problem.from_shapes`: the blocks of columns add up."""
        m, k = a_shapes[0]
        return cls(m, sum(columns for _, columns in b_shapes), k, len(a_shapes), dtype)

    def columns(self, rank: int) -> tuple[int, int]:
        """Return which columns of C, from and without, a rank computes."""
        return shard_bounds(self.n, self.world_size, rank)

    def a_shape(self, rank: int) -> tuple[int, int]:
        """(m, k) on every rank."""
        return self.m, self.k

    def b_shape(self, rank: int) -> tuple[int, int]:
        """(k, the rank's columns)."""
        start, stop = self.columns(rank)
        return self.k, stop - start

    def c_bounds(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """All of C on every rank."""
        return (0, self.m), (0, self.n)

    def shards(self, rank: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Problem.shards`."""
        return a, b[:, slice(*self.columns(rank))]

    @property
    def wire_bytes(self) -> int:
        """What rank 0, whose block is the largest, sends: its block to every peer."""
        return (self.world_size - 1) * self.m * self.b_shape(0)[1] * self.out_dtype.itemsize


def gradients(
    product: Product, a: torch.Tensor, b: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`.

    C's is the same on all ranks; A's is summed over their columns.
    """
    own = own_columns(product, grad)
    of_a = of_b = None
    if wanted[0]:
        (of_a,) = product.backward("gemm_all_reduce", own, [one.t() for one in b], product.m, product.k, product.n)
    if wanted[1]:
        of_b = a.t() @ own
    return of_a, of_b


def own_columns(product: Product, grad: torch.Tensor) -> torch.Tensor:
    """Return of C's gradient the columns that this rank's B gives."""
    ctx = context_named(product.context)
    return grad[:, slice(*shard_bounds(product.n, ctx.get_num_ranks(), ctx.get_rank()))]
