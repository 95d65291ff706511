"""All-gather + GEMM: sizes, shards, bytes on the wire, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..common.operators.product import Product
from ..common.problem import Problem, Shapes, shard_bounds


@dataclass(frozen=True)
class AllGatherGemmProblem(Problem):
    """C (m, n) = A (m, k) @ B (k, n): A is cut by rows, B and C by columns.

    A rank gathers all of A and computes its block of columns of C.

    Args:
        m: rows of A over all ranks, of which a rank holds ``ceil(m / world_size)`` or fewer.
        n: columns of B over all ranks, of which a rank holds ``ceil(n / world_size)`` or fewer.
        k: columns of A and rows of B, whole on every rank.
        world_size, dtype, epilogue, out_dtype, b_dtype, scales, use_fast_accum, a_dtype: as of `Problem`.
        partial_dtype: without effect: no partial sums travel.
        norm: None: no rank has whole rows of C.

    Raises:
        ValueError: as of `Problem`; or n, or a rank's columns, that a gated epilogue cannot pair.
    """

    allows_narrowing = True
    allows_quantizing = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.narrowing > 1 and (self.n % self.narrowing or self.b_shape(0)[1] % self.narrowing):
            raise ValueError(
                f"{self.epilogue[-1]} makes one column of {self.narrowing}; n is {self.n}, of which rank 0 has "
                f"{self.b_shape(0)[1]}: both must be multiples of {self.narrowing}"
            )

    @classmethod
    def from_shapes(cls, a_shapes: Shapes, b_shapes: Shapes, dtype: torch.dtype) -> AllGatherGemmProblem:
        """See `Problem.from_shapes`: A's shards of rows add up, and B's blocks of columns."""
        m, n = sum(rows for rows, _ in a_shapes), sum(columns for _, columns in b_shapes)
        return cls(m, n, a_shapes[0][1], len(a_shapes), dtype)

    def m_of(self, a_rows: int, rank: int) -> int | None:
        """See `Problem.m_of`: by its own 3 rows a rank on four cannot tell 9 of all ranks from 12."""
        return self.m if a_rows == self.a_shape(rank)[0] else None

    def rows(self, rank: int) -> tuple[int, int]:
        """Return which rows of A, from and without, a rank holds."""
        return shard_bounds(self.m, self.world_size, rank)

    def columns(self, rank: int) -> tuple[int, int]:
        """Return which columns of A @ B, from and without, a rank computes."""
        return shard_bounds(self.n, self.world_size, rank)

    def a_shape(self, rank: int) -> tuple[int, int]:
        """(the rank's rows, k)."""
        start, stop = self.rows(rank)
        return stop - start, self.k

    def b_shape(self, rank: int) -> tuple[int, int]:
        """(k, the rank's columns)."""
        start, stop = self.columns(rank)
        return self.k, stop - start

    def c_bounds(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """All rows, and what the epilogue makes of the rank's columns."""
        start, stop = self.columns(rank)
        return (0, self.m), (start // self.narrowing, stop // self.narrowing)

    def shards(self, rank: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Problem.shards`."""
        return a[slice(*self.rows(rank))], b[:, slice(*self.columns(rank))]

    @property
    def flops(self) -> int:
        """Of rank 0, whose block is the largest."""
        return 2 * self.m * self.b_shape(0)[1] * self.k

    @property
    def wire_bytes(self) -> int:
        """What rank 0, whose shard is the largest, sends: its shard to every peer."""
        return (self.world_size - 1) * self.shard_bytes

    @property
    def shard_bytes(self) -> int:
        """The largest shard of A."""
        return self.a_shape(0)[0] * self.k * self.dtype.itemsize


def gradients(
    product: Product, a: torch.Tensor, b: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`.

    A's by a GEMM and a reduce-scatter, B's from the gathered A.
    """
    of_a = of_b = None
    if wanted[0]:
        (of_a,) = product.backward("gemm_reduce_scatter", grad, [one.t() for one in b], product.m, product.k, product.n)
    if wanted[1]:
        of_b = a.t() @ grad
    return of_a, of_b
