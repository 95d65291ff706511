"""What the fused variants of all-gather + GEMM share on the host."""

from __future__ import annotations

from typing import Any

import torch

from iris_core import Context

from ..common.arguments import Block, Gemm
from ..common.config import GemmConfig
from ..common.fused_operator import FusedOperator
from ..common.operands import padded
from ..common.operator import lies_within, overlap
from ..common.torch_op import Overwritten
from .problem import AllGatherGemmProblem
from .shards import Shard

FAMILY = "all_gather_gemm"


class Gathers:
    """What all operators of the family have beside their output.

    Attributes:
        keep_gathered: whether `call` returns A too.
        gathered: A (m, k), overwritten by the next call; its rows may lie further apart than they are long. It cannot
            be read in a graph of `torch.compile`, where `call` returns it.
    """

    keep_gathered = True
    gathered = Overwritten()
    _gathered: torch.Tensor

    def _overwrites(self, name: str, operand: torch.Tensor) -> bool:
        """A's own rows may be where they are gathered: nobody else writes there."""
        operator: Any = self
        gathered = getattr(self, "_gathered", None)
        if gathered is not None and overlap(operand, gathered):
            own = gathered[slice(*operator.problem.rows(operator.rank))]
            return name != "A" or not own.numel() or not lies_within(operand, own)
        return overlap(operand, operator._output)

    def auxiliary_outputs(self) -> tuple[torch.Tensor, ...]:
        """Return A if it is kept."""
        return (self._gathered,) if self.keep_gathered else ()


class AllGatherGemm(Gathers, FusedOperator[AllGatherGemmProblem]):
    """An operator whose output is this rank's columns of C.

    Args:
        ctx, problem, config: see `Operator`.
        keep_gathered: complete `gathered`, the whole A (m, k), in every call, for the caller to read; without it the
            rows of this rank, which are read where the caller has them, are missing there, and those of the peers may
            change as soon as the call has ended.

    Attributes:
        gathered: A, on the heap; see `Gathers`.
    """

    family = FAMILY
    options = ("keep_gathered",)

    def __init__(
        self,
        ctx: Context,
        problem: AllGatherGemmProblem,
        config: GemmConfig | None = None,
        *,
        keep_gathered: bool = False,
    ) -> None:
        self.keep_gathered = keep_gathered
        super().__init__(ctx, problem, config)

    def default_config(self) -> GemmConfig:
        return self._config_for(self.problem.m, self.problem.b_shape(0)[1])  # the largest block of columns

    def _open_buffers(self) -> None:
        problem = self.problem
        self.gathered = self._gathered_on_heap(problem.m)
        self._own_rows = slice(*problem.rows(self.rank))
        self._open_output()

    def _gathered_on_heap(self, rows: int) -> torch.Tensor:
        """Return room for gathered rows, so far apart that descriptors, if there are any, can name them."""
        problem = self.problem
        distance = padded(problem.k, problem.dtype) if self.config.descriptors else problem.k
        return self._on_heap((rows, distance), problem.dtype)[:, : problem.k]

    def _open_output(self) -> None:
        """Make `output`."""
        m, n = self.problem.c_shape(self.rank)
        # A rank without columns still takes part: it computes nothing, into room for one column.
        room = torch.zeros(m, max(n, 1), dtype=self.problem.dtype, device=self.ctx.get_device())
        self.output = room[:, :n]
        self._block = Block(room, m, n, room.stride(0))

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        own = self.gathered[self._own_rows]
        has_descriptors = self.config.descriptors
        if self.keep_gathered and not (has_descriptors and self._operand_copies.are_needed("A", a)):
            self._calls.copy(own, a)
        if has_descriptors:
            a, b = self._operand_copies.readable(a, b, room_of_a=own)
        self._overlap(a, b)
        return self.output

    def _overlap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Queue the gather and the multiplication."""
        raise NotImplementedError

    def _multiply_arguments(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
        """Return what a kernel that multiplies takes."""
        problem = self.problem
        own = self._main_loop(a if a.shape[0] else self.gathered, b, self.gathered)
        gathered_gemm = Gemm(problem.k, self.gathered.stride(0), 1, b.stride(0), b.stride(1))
        return {
            **own,
            "gathered_gemm": gathered_gemm,
            "block": self._block,
            "shard_rows": problem.a_shape(0)[0],
            "peers": self._peers(),
            "WORLD_SIZE": problem.world_size,
        }

    def _push_arguments(self, a: torch.Tensor) -> dict[str, Any]:
        """Return what a kernel that pushes this rank's shard takes."""
        rows, columns = a.shape
        source = a if a.numel() else self.gathered
        destination = self.gathered[self._own_rows] if rows else self.gathered
        shard = Shard(source, destination, rows, columns, a.stride(0), a.stride(1), self.gathered.stride(0))
        return {
            "shard": shard,
            "peers": self._peers(),
            "ROWS": self.config.comm_rows,
            "COLS": self.config.block_n,
            "WORLD_SIZE": self.problem.world_size,
        }
