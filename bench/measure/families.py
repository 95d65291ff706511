"""What the harness must know about each family: its operands, what the output must be, its communication alone.

The `Problem` in the module that a family's entry point names says all of it (`_Described`). Of the families here a rank
draws no more of A and B than it needs, and their communication is that of the library's variant.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from iris_core import Context
from iris_kernels.common.config import is_fp8
from iris_kernels.common.device.epilogue import epilogue_ops, finish_with_torch
from iris_kernels.common.fp8.scales import dequantised, quantise
from iris_kernels.common.variants.library import all_gather_single, reduce_scatter_single
from overlap_taxonomy import Agent, Schedule, get_variant, list_families, module_of

from .inputs import Draw

Operands = tuple[torch.Tensor, torch.Tensor]


def unchanged(c: torch.Tensor) -> torch.Tensor:
    """Return C as it is."""
    return c


PROMOTED_K = 128  # of fp8: after so many products a sum that is promoted is, at most


@dataclass(frozen=True)
class Block:
    """A part of a rank's output: ``output[rows, columns]`` is the sum of ``a @ b`` over `terms`.

    A term is what one rank contributes, rounded to the `dtype` on its way; None for the operands'. `finish` gives what
    the epilogue makes of the sum; it makes an error larger by `slope` at most. So many products, `truncated_k`, are
    summed in the accumulators of fp8, which have fewer bits, before they are added in fp32; 0: none.
    """

    rows: slice
    columns: slice
    terms: list[Operands]
    finish: Callable[[torch.Tensor], torch.Tensor] = unchanged
    slope: float = 1.0
    dtype: torch.dtype | None = None
    truncated_k: int = 0


class Family(ABC):
    """One family of kernels, as the harness sees it. Problems are those of the family's own type."""

    name: str
    collective: str  # "all_gather" or "reduce_scatter": whose shapes it takes
    shards_columns: bool = True  # whether a rank's B has columns of its own

    def problem(
        self,
        *,
        m: int,
        n: int,
        k: int,
        world_size: int,
        dtype: torch.dtype,
        epilogue: tuple[str, ...] = (),
        scales: tuple[str, ...] = (),
        b_dtype: torch.dtype | None = None,
        a_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Any:
        """Return the problem of these sizes; ValueError where they make none. fp8 has scales of rows by default."""
        module: Any = module_of(self.name)
        how: dict[str, Any] = {}
        if is_fp8(dtype):
            how = {"scales": scales or ("row", "column"), "b_dtype": b_dtype, "a_dtype": a_dtype}
            how["use_fast_accum"] = use_fast_accum
        problem = module.Problem(m, n, k, world_size, dtype, epilogue, **how)
        if problem.narrowing > 1:
            raise ValueError(f"{epilogue[-1]} makes C narrower than A @ B; that is not measured")
        return problem

    def operands(self, problem: Any, rank: int, draw: Draw) -> Operands:
        """Return a rank's A and B. B is the transpose of a contiguous matrix, as the weight of an ``nn.Linear`` is."""
        a = self._a(problem, rank, draw) if problem.is_quantised else self._quantised_a(problem, rank, draw)[0]
        return a, self._quantised_b(problem, rank, draw)[0]

    def read_by_epilogue(self, problem: Any, rank: int, draw: Draw) -> dict[str, torch.Tensor]:
        """Return what a rank's epilogue reads, by name; where all ranks have all columns, the same on all."""
        shapes, whose = problem.operand_shapes(rank), rank if self.shards_columns else ""
        return {
            name: draw.normal(f"{name}{whose}", shape, problem.operand_dtype(name))
            for name, shape in shapes.items()
            if name not in ("a_scale", "b_scale")
        }

    def read(self, problem: Any, rank: int, draw: Draw) -> dict[str, torch.Tensor]:
        """Return all operands of a rank but A and B, by name: their scales, and what the epilogue reads."""
        made = {
            "a_scale": self._quantised_a(problem, rank, draw)[1],
            "b_scale": self._quantised_b(problem, rank, draw)[1],
        }
        taken = problem.operand_shapes(rank)  # an A that the call quantises has none
        scales = {name: scale for name, scale in made.items() if scale is not None and name in taken}
        return {**scales, **self.read_by_epilogue(problem, rank, draw)}

    def _quantised_a(self, problem: Any, rank: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a rank's A, and its scale if the problem has scales."""
        a = self._a(problem, rank, draw)
        return quantise(a, problem.dtype, problem.scales[0]) if problem.scales else (a, None)

    def _quantised_b(self, problem: Any, rank: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a rank's B, by columns, and its scale if the problem has scales."""
        b = self._b(problem, rank, draw)
        if not problem.scales:
            return b, None
        small, scale = quantise(b, problem.b_dtype, problem.scales[1], is_b=True)
        return small.t().contiguous().t(), scale

    def wide_a(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        """Return what a rank's A and its scale stand for."""
        return (
            self._a(problem, rank, draw) if not problem.scales else dequantised(*self._quantised_a(problem, rank, draw))
        )

    def wide_b(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        """Return what a rank's B and its scale stand for."""
        return (
            self._b(problem, rank, draw) if not problem.scales else dequantised(*self._quantised_b(problem, rank, draw))
        )

    def _block(self, problem: Any, rank: int, draw: Draw, rows: slice, columns: slice, terms: list[Operands]) -> Block:
        """Return a part of an output that this rank finishes."""
        ops, read = epilogue_ops(problem.epilogue), self.read_by_epilogue(problem, rank, draw)
        own = {op.operand: read[op.operand][slice(None) if op.per == "column" else rows] for op in ops if op.operand}

        def finish(c: torch.Tensor) -> torch.Tensor:
            return finish_with_torch(c, problem.epilogue, own)

        slope = math.prod(op.slope_with(own.get(op.operand)) for op in ops)
        truncated_k = (PROMOTED_K if problem.is_promoted else problem.k) if is_fp8(problem.dtype) else 0
        return Block(rows, columns, terms, finish, slope, problem.dtype_of_partials, truncated_k)

    def gemm_a(self, problem: Any, a: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return an A as large as what a rank multiplies: its own, or a gathered one."""
        return a

    @abstractmethod
    def heap_bytes(self, problem: Any) -> int:
        """Return what one fused operator holds of a rank's heap, at most."""

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
        return draw.normal(f"A{rank}", problem.a_shape(rank), _drawn(problem))

    def _b(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        k, n = problem.b_shape(rank)
        return draw.normal(f"B{rank}", (n, k), _drawn(problem)).t()


def _drawn(problem: Any) -> torch.dtype:
    """Return the dtype in which operands are drawn: fp8 is quantised from fp32, or from what a call quantises."""
    return torch.float32 if problem.scales and not problem.is_quantised else problem.a_dtype


class _GemmAllScatter(Family):
    name = "gemm_all_scatter"
    collective = "all_gather"

    def heap_bytes(self, problem: Any) -> int:
        return problem.m * problem.n * problem.out_dtype.itemsize

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        a = self.wide_a(problem, rank, draw)
        for peer in range(problem.world_size):
            terms = [(a, self.wide_b(problem, peer, draw))]
            yield self._block(problem, peer, draw, slice(None), slice(*problem.columns(peer)), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        return _all_gather(ctx, (problem.m, problem.b_shape(0)[1]), problem.out_dtype)

    def _a(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        return draw.normal("A", problem.a_shape(rank), _drawn(problem))  # the same on every rank


class _AllGatherGemm(Family):
    name = "all_gather_gemm"
    collective = "all_gather"

    def gemm_a(self, problem: Any, a: torch.Tensor, draw: Draw) -> torch.Tensor:
        return draw.normal("gathered A", (problem.m, problem.k), _drawn(problem)).to(problem.dtype)

    def heap_bytes(self, problem: Any) -> int:
        row_bytes = problem.k * problem.dtype.itemsize + 4 * problem.scale_columns
        return 2 * problem.m * row_bytes  # two buffers of all of A

    def auxiliary_options(self, variant: str) -> dict[str, Any]:
        one = get_variant(self.name, variant)
        loads_from_peers = one.agent is Agent.COMPUTING_PROGRAM and one.schedule is Schedule.DATA_PARALLEL
        return {} if loads_from_peers else {"keep_gathered": True}  # and never gathers A

    def auxiliary(self, problem: Any, draw: Draw) -> tuple[torch.Tensor, ...]:
        parts = [self._quantised_a(problem, peer, draw) for peer in range(problem.world_size)]
        gathered = torch.cat([a for a, _ in parts])
        if not problem.scales:
            return (gathered,)
        # The scale of a shard is one for each of its rows.
        scales = [scale if len(scale) == len(a) else scale.expand(len(a), 1) for a, scale in parts if scale is not None]
        return gathered, torch.cat(scales)

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        b = self.wide_b(problem, rank, draw)
        for peer in range(problem.world_size):
            terms = [(self.wide_a(problem, peer, draw), b)]
            yield self._block(problem, rank, draw, slice(*problem.rows(peer)), slice(None), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        return _all_gather(ctx, problem.a_shape(0), problem.dtype)


class _GemmReduceScatter(Family):
    name = "gemm_reduce_scatter"
    collective = "reduce_scatter"
    shards_columns = False

    def heap_bytes(self, problem: Any) -> int:
        elements = problem.world_size * -(-problem.m // problem.world_size) * problem.n
        return 2 * (elements * problem.dtype_of_partials.itemsize + elements // 128)  # a shard per rank twice; flags

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        rows = slice(*problem.rows(rank))
        ranks = range(problem.world_size)
        terms = [(self.wide_a(problem, peer, draw)[rows].clone(), self.wide_b(problem, peer, draw)) for peer in ranks]
        yield self._block(problem, rank, draw, slice(None), slice(None), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        return _reduce_scatter(ctx, (-(-problem.m // problem.world_size), problem.n), problem.dtype_of_partials)


class _GemmAllReduce(_GemmReduceScatter):
    name = "gemm_all_reduce"

    def heap_bytes(self, problem: Any) -> int:
        elements = problem.m * problem.n
        workspace = 2 * problem.world_size * (elements + problem.n)  # one-shot: twice a whole C a rank
        itemsize = max(problem.dtype_of_partials.itemsize, problem.out_dtype.itemsize)
        return (workspace + elements) * itemsize + workspace // 128  # the output, and flags

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        ranks = range(problem.world_size)
        terms = [(self.wide_a(problem, peer, draw), self.wide_b(problem, peer, draw)) for peer in ranks]
        yield self._block(problem, rank, draw, slice(None), slice(None), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        group = ctx.process_group()
        partial = torch.zeros(problem.m, problem.n, dtype=problem.dtype_of_partials, device=ctx.get_device())
        return lambda: dist.all_reduce(partial, group=group)


def _all_gather(ctx: Context, shard: tuple[int, int], dtype: torch.dtype) -> Callable[[], object]:
    """The collective on shards of this shape, the largest rank's."""
    group = ctx.process_group()
    dtype = torch.uint8 if is_fp8(dtype) else dtype  # as not all backends have fp8
    own = torch.zeros(shard, dtype=dtype, device=ctx.get_device())
    gathered = own.new_empty(ctx.get_num_ranks() * shard[0], shard[1])
    return lambda: all_gather_single(gathered, own, group=group)


def _reduce_scatter(ctx: Context, shard: tuple[int, int], dtype: torch.dtype) -> Callable[[], object]:
    """The collective that leaves shards of this shape, the largest rank's."""
    group = ctx.process_group()
    own = torch.zeros(shard, dtype=dtype, device=ctx.get_device())
    partial = own.new_zeros(ctx.get_num_ranks() * shard[0], shard[1])
    return lambda: reduce_scatter_single(own, partial, group=group)


class _Described(Family):
    """A family of another distribution, as its problem describes it. Every rank draws all of A and B."""

    def __init__(self, name: str) -> None:
        self.name = name
        size = 64
        example = self.problem(m=size, n=size, k=size, world_size=2, dtype=torch.bfloat16)
        self._shards_k = example.a_shape(0)[1] < size
        self.collective = "reduce_scatter" if self._shards_k else "all_gather"

    def problem(self, *, epilogue: tuple[str, ...] = (), **sizes: Any) -> Any:
        problem = super().problem(epilogue=epilogue, **sizes)
        if problem.scales:
            raise ValueError(f"{self.name}: fp8 is measured of other families")
        if operands := problem.operand_shapes(0):
            raise ValueError(f"{self.name}: an epilogue that reads {', '.join(operands)} is measured of other families")
        return problem

    def operands(self, problem: Any, rank: int, draw: Draw) -> Operands:
        a, b = problem.shards(rank, self._a(problem, rank, draw), self._b(problem, rank, draw))
        return a, b

    def heap_bytes(self, problem: Any) -> int:
        m, n, k = problem.m, problem.n, problem.k
        return 2 * problem.world_size * (m * k + k * n + m * n) * problem.dtype.itemsize

    def blocks(self, problem: Any, rank: int, draw: Draw) -> Iterator[Block]:
        a, b = self._a(problem, rank, draw), self._b(problem, rank, draw)
        rows, columns = (slice(*bounds) for bounds in problem.c_bounds(rank))
        ranks = range(problem.world_size)
        terms = [problem.shards(peer, a, b) for peer in ranks] if self._shards_k else [(a, b)]
        terms = [(one[rows], other[:, columns]) for one, other in terms]
        yield self._block(problem, rank, draw, slice(None), slice(None), terms)

    def communication(self, ctx: Context, problem: Any) -> Callable[[], object]:
        elements = problem.wire_bytes // problem.dtype.itemsize // max(1, problem.world_size - 1)
        queue = _reduce_scatter if self._shards_k else _all_gather
        return queue(ctx, (1, elements), problem.dtype)

    def _a(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        return draw.normal("A", (problem.m, problem.k))

    def _b(self, problem: Any, rank: int, draw: Draw) -> torch.Tensor:
        return draw.normal("B", (problem.n, problem.k)).t()


_OWN: dict[str, Family] = {
    family.name: family for family in (_GemmAllScatter(), _AllGatherGemm(), _GemmReduceScatter(), _GemmAllReduce())
}


class _Families(Mapping[str, Family]):
    """All families, by name; of other distributions, those that have a module with a `Problem`."""

    def __getitem__(self, name: str) -> Family:
        if name in _OWN:
            return _OWN[name]
        if name not in list(self):
            raise KeyError(name)
        return _Described(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in list_families() if hasattr(module_of(name), "Problem"))

    def __len__(self) -> int:
        return len(list(iter(self)))


FAMILIES = _Families()
