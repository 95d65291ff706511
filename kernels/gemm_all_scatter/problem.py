"""GEMM + all-scatter: sizes, shards, work, and bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common.problem import Problem, Shapes, shard_bounds


@dataclass(frozen=True)
class GemmAllScatterProblem(Problem):
    """C (m, n) = A (m, k) @ B (k, n): A is replicated, B cut by columns, C whole on every rank.

    A rank computes its block of columns of C and every rank receives it.
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
