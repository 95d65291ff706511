"""A call over several hosts: what a family's schedule of chunks is given, and the parts that schedules share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as functional

from iris_core.hierarchical import HierarchicalContext, Rail, Transfer
from iris_core.rendezvous.topology import Topology

from ..config import GemmConfig
from ..device.epilogue import epilogue_ops, finish_with_torch
from ..operators.functional import operator_of
from ..operators.operator import Operator
from ..problem import Problem
from .blas_sms import blas_on_sms

P = TypeVar("P", bound=Problem)
PARTS = 1024  # problems inside a host that a family keeps
COLUMNS_OF_A_CHUNK = 128  # a multiple of which chunks of columns have: a tile's


@dataclass
class HierarchicalCall(Generic[P]):
    """A call over several hosts.

    Args:
        ctx: of all ranks.
        problem: of all ranks, with the call's rows.
        family, variant, config, options: of the operators inside a host.
        chunks: into how many what goes to a host, or comes from one, is cut.
        operands: what the epilogue reads, by name.
    """

    ctx: HierarchicalContext
    problem: P
    family: str
    variant: str
    config: GemmConfig | None
    options: Mapping[str, Any]
    chunks: int
    operands: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This rank, of all."""
        return self.ctx.get_rank()

    @property
    def topology(self) -> Topology:
        """Hosts × ranks."""
        return self.ctx.topology

    @property
    def rail(self) -> Rail:
        """Transfers to other hosts."""
        return self.ctx.rail

    def distant(self) -> list[tuple[int, int]]:
        """Return the other hosts, nearest first: pairs of the hosts so far above and so far below this one.

        All ranks go through them in this order, so that a host has one to send to, and one to receive from, at a time.
        """
        own, hosts = self.rail.host, self.topology.num_hosts
        return [((own + distance) % hosts, (own - distance) % hosts) for distance in range(1, hosts)]

    @property
    def is_alone(self) -> bool:
        """Whether a rank is its host's only one and multiplies with torch: there is nothing to fuse inside a host."""
        return self.variant == "auto" and self.topology.ranks_per_host == 1

    def operator(self, problem: Problem) -> Operator[Any]:
        """Return the operator of this host's ranks for a problem of theirs; collective where it must be made."""
        return operator_of(self.ctx.local, self.family, problem, self.variant, self.config, **self.options)

    def multiply(
        self,
        problem: Problem,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        operands: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return what the ranks of this host make of their operands, C as one matrix, in memory of its own.

        Args:
            problem: theirs.
            a, b: this rank's.
            out: where C is to be, of any strides; None for new memory.
            operands: what the epilogue reads.
        """
        if self.is_alone:
            return self._multiply_alone(problem, a, b, out, operands or {})
        operator = self.operator(problem)
        is_direct = out is not None and not operator.keeps_outputs and _is_plain(out)
        c, *others = operator.call(a, b, m=problem.m, out=out if is_direct else None, **operands or {})
        c = operator.as_matrix(c)
        if out is not None and not is_direct:
            c = out.copy_(c.view(out.shape))
        elif operator.keeps_outputs:
            c = c.clone()  # a transfer may read it while the next call writes there
        return c, *others

    def _multiply_alone(
        self,
        problem: Problem,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        operands: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        c = None if out is None else out.view(problem.m, -1)
        is_product = not problem.epilogue and problem.out_dtype == a.dtype
        with blas_on_sms(self.ctx.local.get_cu_count()) if a.is_cuda else contextlib.nullcontext():
            product = torch.mm(a, b, out=c if is_product else None)
        if is_product:
            c = product
        else:
            finished = finish_with_torch(product.to(problem.out_dtype), problem.epilogue, dict(operands))
            c = finished if c is None else c.copy_(finished)
        return (c, a) if self.options.get("keep_gathered") else (c,)

    def operands_of(
        self, rows: int, columns: int, take: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what the epilogue reads for a part of this rank's C.

        Args:
            rows, columns: that this rank's C is padded to.
            take: returns the part's rows of a tensor of all.
        """
        found = {}
        for op in epilogue_ops(self.problem.epilogue):
            if op.operand:
                whole = padded(self.operands[op.operand], *op.operand_shape(rows, columns))
                found[op.operand] = whole if op.per == "column" else take(whole)
        return found


@dataclass(frozen=True)
class HostStep:
    """A step of a schedule over several hosts, the same on all of them; an `overlap_taxonomy.Step` without its time.

    Args:
        inside: what the ranks of a host multiply; None for nothing.
        arrives_bytes, leaves_bytes, is_last: as a `Step`'s.
        moved_bytes: that a rank reads and writes in its own memory.
        gathered_bytes: that it sends to the others of its host in an all-gather.
    """

    inside: Problem | None
    arrives_bytes: int = 0
    leaves_bytes: int = 0
    is_last: bool = False
    moved_bytes: int = 0
    gathered_bytes: int = 0


@dataclass(frozen=True)
class Hierarchy:
    """How a family is done over several hosts.

    Args:
        family: of the operators inside a host.
        steps: returns what a call of so many chunks does.
        run: queues a call on this rank's A and B, and returns its outputs: C, then the family's others.
        options: the family's own arguments, with their defaults.
        baseline: the library's variant whose output is what the family's function promises.
        gathers_inside: whether `run` takes collectives of `ctx.local.ccl`.
    """

    family: str
    steps: Callable[[Any, Topology, int], Sequence[HostStep]]
    run: Callable[[HierarchicalCall[Any], torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = "library"
    gathers_inside: bool = False

    def inside(self, problem: Problem, topology: Topology, chunks: int) -> list[Problem]:
        """Return what the ranks of a host multiply in a call of so many chunks, the largest first."""
        found = {step.inside for step in self.steps(problem, topology, chunks) if step.inside is not None}
        return sorted(found, key=lambda one: (one.m, one.n), reverse=True)


def padded(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a tensor of this shape that begins with `tensor`, and has zeros beyond: itself where it is as large."""
    if tuple(tensor.shape) == shape:
        return tensor
    missing = [(0, size - given) for given, size in zip(tensor.shape, shape, strict=True)]
    return functional.pad(tensor, [pad for pair in reversed(missing) for pad in pair])


def cut(size: int, chunks: int, multiple: int = 1) -> list[slice]:
    """Return so many slices of a size, or fewer, as equal as multiples allow."""
    step = -(-max(1, -(-size // chunks)) // multiple) * multiple
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def length(chunk: slice) -> int:
    """Return how long a slice of `cut` is."""
    return chunk.stop - chunk.start


def _is_plain(out: torch.Tensor) -> bool:
    """Whether kernels can store into a place: one behind the other, from where descriptors can begin."""
    return out.ndim == 2 and out.is_contiguous() and out.data_ptr() % 16 == 0


__all__ = ["HierarchicalCall", "Hierarchy", "HostStep", "Transfer", "cut", "length", "padded"]
