"""What the two-shot variants of GEMM + all-reduce share on the host: reduce-scatter whose sums go to every rank."""

from __future__ import annotations

import torch

from ..common.arguments import Block
from ..common.launch_metadata import Arguments, launch_metadata, peers_of
from ..gemm_reduce_scatter.operator import GemmReduceScatter

FAMILY = "gemm_all_reduce"


def _moved(args: Arguments) -> int:
    """Return how many elements are stored as partials to peers, and read as all ranks' partials."""
    return args["out"].m * args["out"].n * (2 * peers_of(args) + 1)


ONE_SHOT = launch_metadata(product=lambda args: (args["out"].m, args["out"].n, args["gemm"].k), moved=_moved)


class TwoShot(GemmReduceScatter):
    """Mixed into an operator of GEMM + reduce-scatter: its output is the whole sum, on every rank's heap.

    A rank sums its shard of C and stores it to all ranks, so every rank has the same bits. The ready signal covers
    the output too, and the call ends when all peers' sums have arrived.
    """

    family = FAMILY

    @property
    def destinations(self) -> int:  # type: ignore[override]
        return self.problem.world_size

    def _open_output(self) -> tuple[torch.Tensor, Block]:
        width = self._width(self.problem.n)
        room = self._on_heap((self.problem.m, width), self.problem.dtype)
        start, stop = self.problem.rows(self.rank)
        corner = room[start:] if stop > start else room  # a rank without rows stores nothing
        return room[:, : self.problem.n], Block(corner, stop - start, width, width)
