"""A call over several hosts: what a family's schedule of chunks is given, and the parts that schedules share."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from iris_core.context.hierarchical import HierarchicalContext, Rail, Transfer
from iris_core.rendezvous.topology import Topology
from overlap_taxonomy import list_families

from ..config import GemmConfig, is_fp8
from ..device.epilogue import epilogue_ops, finish_with_torch
from ..fp8.scales import SCALE_BLOCK, scale_shapes
from ..operators.dispatch import operators_of
from ..operators.operator import Operator
from ..portable.row_norm import normed_rows
from ..problem import Problem
from ..torch_product import product_for

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
        operands: what is read beside A and B, by name: scales, what the epilogue and a norm read.
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
        """Whether a rank is its host's only one and multiplies with torch."""
        return multiplies_alone(self.problem, self.variant, self.topology)

    def operator(self, problem: Problem) -> Operator[Any]:
        """Return the operator of this host's ranks for a problem of theirs; collective where it must be made."""
        asked = self.family, problem.with_rows(1), self.variant, self.config
        return operators_of(self.ctx.local, *asked, **self.options).of(problem.m)

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
            operands: what is read beside A and B, by name.
        """
        if self.is_alone:
            return self._multiply_alone(problem, a, b, out, operands or {})
        operator = self.operator(problem)
        is_direct = out is not None and _is_plain(out) and operator.takes_out(out, problem.m)
        c, *others = operator.call(a, b, m=problem.m, out=out if is_direct else None, **operands or {})
        c = operator.as_matrix(c)
        if out is not None and not is_direct:
            c = out.copy_(c.view(out.shape))
        elif operator.keeps_outputs:
            c = c.clone()  # a transfer may read it while the next call writes there
        elif out is None:
            c = c.contiguous()  # kernels may leave a gap behind each row, and transfers take none
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
        with _blas_on_sms(self.ctx.local.get_cu_count()) if a.is_cuda else contextlib.nullcontext():
            product = torch.mm(a, b, out=c) if is_product else product_for(problem.out_dtype, a, b)
        if is_product:
            c = product
        else:
            finished = finish_with_torch(product, problem.epilogue, dict(operands))
            c = finished.to(problem.out_dtype) if c is None else c.copy_(finished)
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

    def scales(self, a_shape: tuple[int, int], b_shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Return the scales of A and B, by name, as those of operands that are padded to these shapes."""
        shapes = scale_shapes(self.problem.scales, a_shape, b_shape)
        return {name: padded(self.operands[name], *shape) for name, shape in shapes.items()}

    def normed(self, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queue what norms the rows of a finished C, and return it: normed rows, and scales if they are fp8."""
        norm = self.problem.norm
        return () if norm is None else normed_rows(c, self.operands["norm_weight"], norm)


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


hierarchies: dict[str, Hierarchy] = {}  # by family


def register_hierarchy(family: str, hierarchy: Hierarchy) -> None:
    """Let operators of a family span hosts."""
    hierarchies[family] = hierarchy


def hierarchy_of(family: str) -> Hierarchy:
    """Return how a family is done over several hosts.

    Raises:
        ValueError: it has no schedule for that.
    """
    list_families()  # which registers them
    if family not in hierarchies:
        raise ValueError(f"{family} has no schedule over several hosts; families that have: {', '.join(hierarchies)}")
    return hierarchies[family]


def multiplies_alone(problem: Problem, variant: str, topology: Topology) -> bool:
    """Return whether each rank is its host's only one, so that there is nothing to fuse, and multiplies with torch.

    fp8 is multiplied by kernels all the same, which take any sizes.
    """
    return variant == "auto" and topology.ranks_per_host == 1 and not is_fp8(problem.dtype)


def padded(tensor: torch.Tensor, *shape: int, is_b: bool = False) -> torch.Tensor:
    """Return a tensor of this shape that begins with `tensor`, and has zeros beyond: itself where it is as large.

    A matrix by columns stays one; a single column is one by columns if it `is_b`, by rows otherwise.
    """
    if tuple(tensor.shape) == shape:
        return tensor
    if tensor.ndim == 2 and tensor.stride(0) == 1 and (tensor.stride(1) != 1 or (is_b and tensor.shape[1] == 1)):
        return padded(tensor.t(), *shape[::-1]).t()
    whole = tensor.new_zeros(shape)
    whole[tuple(slice(size) for size in tensor.shape)] = tensor
    return whole


def rows_of(scale: torch.Tensor, kind: str, rows: slice) -> torch.Tensor:
    """Return the scale of some rows of A; `kind`: of what there is a scale each."""
    return scale if kind == "tensor" else scale[rows]


def columns_of(scale: torch.Tensor, kind: str, columns: slice) -> torch.Tensor:
    """Return the scale of some columns of B, which begin with a block where there is a scale of each."""
    if kind == "tensor":
        return scale
    size = SCALE_BLOCK if kind == "block" else 1
    return scale[:, columns.start // size : -(-columns.stop // size)]


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


__all__ = [
    "HierarchicalCall",
    "Hierarchy",
    "HostStep",
    "Transfer",
    "columns_of",
    "cut",
    "length",
    "padded",
    "rows_of",
]


@contextlib.contextmanager
def _blas_on_sms(sms: int) -> Iterator[None]:
    """Let products of torch's within the block, of 16 or 32 bits, take so many SMs, and leave the others to NCCL.

    cuBLAS's kernels are persistent, so that NCCL's would wait for the whole product. (cuBLAS,
    ``cublasSetSmCountTarget``.) Of other libraries than cuBLAS, products take all SMs.
    """
    if torch.version.cuda is None:
        yield
        return
    blas = _cublas(torch.version.cuda.partition(".")[0])
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    try:
        _set_sms(blas, handle, sms)
        yield
    finally:
        _set_sms(blas, handle, 0)  # all


@functools.cache
def _cublas(version: str) -> ctypes.CDLL:
    """Return the library that torch has loaded."""
    return ctypes.CDLL(f"libcublas.so.{version}")


def _set_sms(blas: ctypes.CDLL, handle: ctypes.c_void_p, sms: int) -> None:
    if status := blas.cublasSetSmCountTarget(handle, sms):
        raise RuntimeError(f"cublasSetSmCountTarget failed with status {status}")
