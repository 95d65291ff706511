"""GEMM + all-reduce: sizes, shards, work, and bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from ..gemm_reduce_scatter.problem import GemmReduceScatterProblem

FAMILY = "gemm_all_reduce"


@dataclass(frozen=True)
class GemmAllReduceProblem(GemmReduceScatterProblem):
    """C (m, n) = A (m, k) @ B (k, n): A and B are cut along k, C is whole on every rank.

    A rank multiplies its slices of k, which gives a partial C, and receives the sum over ranks. Where the sum is made
    by shards of rows, `rows` and `shard_shape` are a rank's.
    """

    def c_bounds(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """All of C on every rank."""
        return (0, self.m), (0, self.n)

    @property
    def wire_bytes(self) -> int:
        """What a rank receives at least: the peers' parts of its shard, and the sums of theirs."""
        partial, out = self.dtype_of_partials.itemsize, self.out_dtype.itemsize
        return super().wire_bytes // partial * (partial + out)
