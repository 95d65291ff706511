"""GEMM + all-scatter by NCCL (RCCL) and cuBLAS (hipBLASLt): the baseline. One GEMM and one all-gather, nothing else.

`all_gather_into_tensor` leaves C in blocks, one a rank: `library` stops there, the fastest that the two give.
A user who needs C as one (m, n) matrix pays a copy, or gathers into strided slices:

| variant | after the GEMM | C is |
|---|---|---|
| `library` | all_gather_into_tensor | (world_size, m, columns), a block a rank |
| `library_layout` | the same, then a copy | (m, n) |
| `library_list` | all_gather into a list of column slices, the paper's baseline | (m, n) |
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..common.library import LibraryOperator, all_gather_single
from .operator import FAMILY
from .problem import GemmAllScatterProblem


class Library(LibraryOperator[GemmAllScatterProblem]):
    """See the module."""

    family = FAMILY
    variant = "library"

    def _open(self) -> None:
        problem, device = self.problem, self.ctx.get_device()
        self._group = self.ctx.process_group()
        self._columns = problem.b_shape(0)[1]  # every rank's block is padded to the largest
        self._own = torch.zeros(problem.m, self._columns, dtype=problem.dtype, device=device)
        self._blocks = torch.empty(problem.world_size, *self._own.shape, dtype=problem.dtype, device=device)
        self.output = self._blocks

    def _multiply(self, a: torch.Tensor, b: torch.Tensor) -> None:
        torch.mm(a, b, out=self._own if b.shape[1] == self._columns else self._own[:, : b.shape[1]])

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._multiply(a, b)
        all_gather_single(self._blocks.view(-1, self._columns), self._own, group=self._group)
        return self._blocks

    def as_matrix(self, output: torch.Tensor) -> torch.Tensor:
        return output.permute(1, 0, 2).reshape(self.problem.m, -1)[:, : self.problem.n]


class LibraryLayout(Library):
    """`Library`, then the copy that brings C into one matrix."""

    variant = "library_layout"

    def _open(self) -> None:
        super()._open()
        self._matrix = self._own.new_empty(self.problem.m, self.problem.world_size, self._columns)
        self.output = self._matrix.view(self.problem.m, -1)[:, : self.problem.n]

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._matrix.copy_(super()._launch(a, b).permute(1, 0, 2))
        return self.output

    def as_matrix(self, output: torch.Tensor) -> torch.Tensor:
        return output


class LibraryList(Library):
    """The list form of all-gather, into slices of columns."""

    variant = "library_list"

    def _open(self) -> None:
        super()._open()
        self.output = self._own.new_empty(self.problem.m, self.problem.world_size * self._columns)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._multiply(a, b)
        dist.all_gather(list(self.output.split(self._columns, dim=1)), self._own, group=self._group)
        return self.output

    def as_matrix(self, output: torch.Tensor) -> torch.Tensor:
        return output[:, : self.problem.n]


VARIANTS = (
    Library.as_variant("torch.mm, then all_gather_into_tensor; C in blocks, a rank each"),
    LibraryLayout.as_variant("the same, then a copy into one matrix"),
    LibraryList.as_variant("torch.mm, then all_gather into column slices (the paper's baseline)"),
)
