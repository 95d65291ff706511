"""What the harness must know about each family: its operands, what the output must be, its communication alone.

To add a family, subclass `Family` and name it in `FAMILIES`. The family's package is ``iris_kernels.<name>`` and has a
`Problem`; it is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from iris_core import Context
from iris_kernels.common.device.epilogue import epilogue_ops, finish_with_torch
from iris_kernels.common.library import all_gather_single, reduce_scatter_single
from overlap_taxonomy import Agent, Schedule, get_variant

from .inputs import Draw

Operands = tuple[torch.Tensor, torch.Tensor]


def unchanged(c: torch.Tensor) -> torch.Tensor:
    """Return C as it is."""
    return c


@dataclass(frozen=True)
class Block:
    """A part of a rank's output: ``output[rows, columns]`` is the sum of ``a @ b`` over `terms`.

    A term is what one rank contributes, rounded to the dtype on its way. `finish` gives what the epilogue makes of the
    sum; it makes an error larger by `slope` at most.
    """

    rows: slice
    columns: slice
    terms: list[Operands]
    finish: Callable[[torch.Tensor], torch.Tensor] = unchanged
    slope: float = 1.0


class Family(ABC):
    """One family of kernels, as the harness sees it. Problems are those of the family's own type."""

    name: str
    collective: str  # "all_gather" or "reduce_scatter": whose shapes it takes
    shards_columns = True  # whether a rank's B has columns of its own

    def problem(
        self, *, m: int, n: int, k: int, world_size: int, dtype: torch.dtype, epilogue: tuple[str, ...] = ()
    ) -> Any:
        """Return the problem of these sizes; ValueError where they make none."""
        return importlib.import_module(f"iris_kernels.{self.name}").Problem(m, n, k, world_size, dtype, epilogue)

    def operands(self, problem: Any, rank: int, draw: Draw) -> Operands:
        """Return a rank's A and B. B is the transpose of a contiguous matrix, as the weight of an ``nn.Linear`` is."""
        return self._a(problem, rank, draw), self._b(problem, rank, draw)

    def read_by_epilogue(self, problem: Any, rank: int, draw: Draw) -> dict[str, torch.Tensor]:
        """Return what a rank's epilogue reads, by name; where all ranks have all columns, the same on all."""
        shapes, whose = problem.operand_shapes(rank), rank if self.shards_columns else ""
        return {name: draw.normal(f"{name}{whose}", shape) for name, shape in shapes.items()}

    def _block(self, problem: Any, rank: int, draw: Draw, rows: slice, columns: slice, terms: list[Operands]) -> Block:
        """Return a part of an output that this rank finishes."""
        ops, read = epilogue_ops(problem.epilogue), self.read_by_epilogue(problem, rank, draw)
        own = {op.operand: read[op.operand][slice(None) if op.per == "column" else rows] for op in ops if op.operand}

        def finish(c: torch.Tensor) -> torch.Tensor:
            return finish_with_torch(c, problem.epilogue, own)

        return Block(rows, columns, terms, finish, math.prod(op.slope_with(own.get(op.operand)) for op in ops))

    def gemm_a(self, problem: Any, a: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return an A as large as what a rank multiplies: its own, or a gathered one."""
        return a

    @abstractmethod
    def heap_bytes(self, problem: Any) -> int:
        """Return what one fused operator holds of a rank's heap, at most."""

    @abstractmethod
    def output_shape(self, problem: Any, rank: int) -> tuple[int, int]:
        """Return the shape of a rank's output."""

    @abstractmethod
    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        """Return the parts that make up a rank's whole output, one at a time."""

    @abstractmethod
    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        """Return a function that queues the library's collective of this family alone; collective."""

    def auxiliary_options(self, variant: str) -> dict[str, Any]:
        """Return what a variant is built with so that it gives auxiliary outputs; nothing if it has none."""
        return {}

    def auxiliary(self, problem: Any, draw: Draw) -> tuple[torch.Tensor, ...]:
        """Return the auxiliary outputs of an operator that is built with these; the same on every rank."""
        return ()

    def _a(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        return draw.normal(f"A{rank}", problem.a_shape(rank))

    def _b(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        k, n = problem.b_shape(rank)
        return draw.normal(f"B{rank}", (n, k)).t()


class _GemmAllScatter(Family):
    name = "gemm_all_scatter"
    collective = "all_gather"

    def heap_bytes(self, problem: Any) -> int:
        return problem.m * problem.n * problem.dtype.itemsize

    def output_shape(self, problem: Any, rank: int) -> tuple[int, int]:
        return problem.m, problem.n

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        a = self._a(problem, rank, draw)
        for peer in range(problem.world_size):
            terms = [(a, self._b(problem, peer, draw))]
            yield self._block(problem, peer, draw, slice(None), slice(*problem.columns(peer)), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        return _all_gather(ctx, (problem.m, problem.b_shape(0)[1]), problem.dtype)

    def _a(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        return draw.normal("A", problem.a_shape(rank))  # the same on every rank


class _AllGatherGemm(Family):
    name = "all_gather_gemm"
    collective = "all_gather"

    def gemm_a(self, problem: Any, a: torch.Tensor, draw: Draw) -> torch.Tensor:
        return draw.normal("gathered A", (problem.m, problem.k))

    def heap_bytes(self, problem: Any) -> int:
        return 2 * problem.m * problem.k * problem.dtype.itemsize  # two buffers of all of A

    def auxiliary_options(self, variant: str) -> dict[str, Any]:
        one = get_variant(self.name, variant)
        loads_from_peers = one.agent is Agent.COMPUTING_PROGRAM and one.schedule is Schedule.DATA_PARALLEL
        return {} if loads_from_peers else {"keep_gathered": True}  # and never gathers A

    def auxiliary(self, problem: Any, draw: Draw) -> tuple[torch.Tensor, ...]:
        return (torch.cat([self._a(problem, peer, draw) for peer in range(problem.world_size)]),)

    def output_shape(self, problem: Any, rank: int) -> tuple[int, int]:
        return problem.m, problem.b_shape(rank)[1]

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        b = self._b(problem, rank, draw)
        for peer in range(problem.world_size):
            terms = [(self._a(problem, peer, draw), b)]
            yield self._block(problem, rank, draw, slice(*problem.rows(peer)), slice(None), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        return _all_gather(ctx, problem.a_shape(0), problem.dtype)


class _GemmReduceScatter(Family):
    name = "gemm_reduce_scatter"
    collective = "reduce_scatter"
    shards_columns = False

    def heap_bytes(self, problem: Any) -> int:
        elements = problem.world_size * -(-problem.m // problem.world_size) * problem.n
        return 2 * (elements * problem.dtype.itemsize + elements // 128)  # twice a shard a rank, and flags

    def output_shape(self, problem: Any, rank: int) -> tuple[int, int]:
        start, stop = problem.rows(rank)
        return stop - start, problem.n

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        rows = slice(*problem.rows(rank))
        ranks = range(problem.world_size)
        terms = [(self._a(problem, peer, draw)[rows].clone(), self._b(problem, peer, draw)) for peer in ranks]
        yield self._block(problem, rank, draw, slice(None), slice(None), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        group, rows = ctx.process_group(), -(-problem.m // problem.world_size)
        shard = torch.zeros(rows, problem.n, dtype=problem.dtype, device=ctx.get_device())
        partial = shard.new_zeros(problem.world_size * rows, problem.n)
        return lambda: reduce_scatter_single(shard, partial, group=group)


class _GemmAllReduce(_GemmReduceScatter):
    name = "gemm_all_reduce"

    def heap_bytes(self, problem: Any) -> int:
        elements = problem.m * problem.n
        workspace = 2 * problem.world_size * (elements + problem.n)  # one-shot: twice a whole C a rank
        return (workspace + elements) * problem.dtype.itemsize + workspace // 128  # the output, and flags

    def output_shape(self, problem: Any, rank: int) -> tuple[int, int]:
        return problem.m, problem.n

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        ranks = range(problem.world_size)
        terms = [(self._a(problem, peer, draw), self._b(problem, peer, draw)) for peer in ranks]
        yield self._block(problem, rank, draw, slice(None), slice(None), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        group = ctx.process_group()
        partial = torch.zeros(problem.m, problem.n, dtype=problem.dtype, device=ctx.get_device())
        return lambda: dist.all_reduce(partial, group=group)


def _all_gather(ctx: Context, shard: tuple[int, int], dtype: torch.dtype) -> Callable[[], object]:
    """The collective on shards of this shape, the largest rank's."""
    group = ctx.process_group()
    own = torch.zeros(shard, dtype=dtype, device=ctx.get_device())
    gathered = own.new_empty(ctx.get_num_ranks() * shard[0], shard[1])
    return lambda: all_gather_single(gathered, own, group=group)


FAMILIES: dict[str, Family] = {
    family.name: family for family in (_GemmAllScatter(), _AllGatherGemm(), _GemmReduceScatter(), _GemmAllReduce())
}
