"""GEMM + all-reduce: sizes, shards, bytes on the wire, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..common.operators.product import Product
from ..gemm_reduce_scatter.problem import GemmReduceScatterProblem

FAMILY = "gemm_all_reduce"


@dataclass(frozen=True)
class GemmAllReduceProblem(GemmReduceScatterProblem):
    """C (m, n) = A (m, k) @ B (k, n): A and B are cut along k, C is whole on every rank.

    A rank multiplies its slices of k, which gives a partial C, and receives the sum over ranks. Where the sum is made
    by shards of rows, `rows` and `shard_shape` are a rank's.

    Args:
        m: rows of A and of C, whole on every rank.
        n: columns of B and of C, whole on every rank.
        k: columns of A and rows of B over all ranks, of which a rank holds ``ceil(k / world_size)`` or fewer.
        world_size, dtype, epilogue, out_dtype, b_dtype, scales, partial_dtype, use_fast_accum, norm: as of `Problem`.
        a_dtype: None, or `dtype`: no A travels that could be quantised.

    Raises:
        ValueError: as of `Problem`.
    """

    def c_bounds(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """All of C on every rank."""
        return (0, self.m), (0, self.n)

    @property
    def wire_bytes(self) -> int:
        """What a rank receives at least: the peers' parts of its shard, and the sums of theirs."""
        partial, out = self.dtype_of_partials.itemsize, self.out_dtype.itemsize
        return super().wire_bytes // partial * (partial + out)


def gradients(
    product: Product, a: torch.Tensor, b: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`.

    C's is the same on all ranks, and nothing is communicated.
    """
    of_a = torch.cat([grad @ one.t() for one in b], 1) if wanted[0] else None
    return of_a, a.t() @ grad if wanted[1] else None
