"""An operator: one variant of a family, bound to a context and a problem, with its buffers, flags and call number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Generic, TypeVar

import torch

from iris_core import Context
from iris_core.utils.torch_modes import plain_tensors

from .config import GemmConfig, invalid_reason
from .problem import Problem
from .torch_op import Overwritten, call_in_graph, name_of

P = TypeVar("P", bound=Problem)


class Operator(ABC, Generic[P]):
    """Call it with this rank's A and B; it queues the work on the current stream and returns this rank's output.

    Making one is collective: all ranks must ask for the same thing. The output belongs to the operator and is
    overwritten by its next call. Peers may store into it as soon as this rank's stream reaches that call, which is when
    the rank signals *ready*: read the output, in stream order, before calling again.

    Args:
        ctx: the context; the output and the flags are allocated on its heap.
        problem: sizes, dtype and number of ranks.
        config: tunables; None for the defaults of this device.

    Attributes:
        config: the configuration.
        ran_config: what the last call ran with, where its operands did not allow for all of it.
        chosen_by: the variant that was asked for, where that one chose this.
        keeps_outputs: whether calls return the same memory each time.
        is_closed: whether its buffers were given back; a call then raises RuntimeError.
        output: that memory. It cannot be read in a graph of `torch.compile`.
        name: what names the operator in graphs of `torch.compile`.
        output_shapes: those of what a call gives; none without `keeps_outputs`.

    Raises:
        ValueError: the ranks ask for different things, or for what the variant cannot do.
        HeapExhausted: the heap has no room for the output.
    """

    family: str
    variant: str
    chosen_by = ""
    options: tuple[str, ...] = ()  # attributes that are the caller's, beside the problem; the same on all ranks
    keeps_outputs = True
    is_closed = False
    output = Overwritten()
    _output: torch.Tensor

    def __init__(self, ctx: Context, problem: P, config: GemmConfig | None = None) -> None:
        self.ctx = ctx
        self.problem = problem
        self.rank = ctx.get_rank()
        with ctx.collective_section(f"make {self}"):
            if problem.world_size != ctx.get_num_ranks():
                raise ValueError(
                    f"the problem is for {problem.world_size} ranks, the context has {ctx.get_num_ranks()}"
                )
            self.config = config or self.default_config()
            reason = self.unsupported_reason(problem, self.config)
            if reason:
                raise ValueError(f"{self} cannot do this: {reason}")
        asked = {name: str(value) for name, value in asdict(problem).items()}
        asked |= {name: str(getattr(self, name)) for name in self.options}
        ctx.agree("what the ranks ask for", {"operator": str(self), **asked, "config": str(self.config)})
        with ctx.collective_allocation(f"make {self}"), plain_tensors():
            self._open()
            self.name = name_of(self)
            self.output_shapes = [list(one.shape) for one in self.outputs()] if self.keeps_outputs else []
        self.ran_config = self.config
        ctx.barrier()

    @classmethod
    def unsupported_reason(cls, problem: P, config: GemmConfig | None) -> str | None:
        """Return why this variant cannot do a problem with a configuration (None: the defaults), or None if it can."""
        return invalid_reason(config) if config else None

    @abstractmethod
    def default_config(self) -> GemmConfig | None:
        """Return the configuration to use where the caller gives none; None if there is nothing to configure."""

    @abstractmethod
    def _open(self) -> None:
        """Allocate what the calls need."""

    @abstractmethod
    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Queue one call; return this rank's output."""

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Queue one call on the current stream; under `torch.compile` as a step of the graph, which returns a copy.

        Args:
            a, b: this rank's operands, of the shapes the problem gives, its dtype, and on the context's device; any
                strides. They need not be on the heap, and have no gradient: call with those that require one under
                ``torch.no_grad()``.

        Returns:
            This rank's output, complete when the stream gets there.

        Raises:
            ValueError: an operand does not fit the problem, is no dense tensor, requires a gradient, or lies in the
                operator's own output.
            RuntimeError: the operator was closed.
            TimeoutError, PeerError: an earlier call waited in vain for a peer, on whatever rank; `Context.check`.
        """
        # Another tensor each time, over the same memory: what autograd writes on one it does not find on the next.
        return call_in_graph(self, a, b)[0] if torch.compiler.is_dynamo_compiling() else self._call(a, b).detach()

    def call(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As a call of the operator, and return all that it gives: the output, then `auxiliary_outputs`."""
        if torch.compiler.is_dynamo_compiling():
            return call_in_graph(self, a, b)
        output = self._call(a, b)
        return tuple(one.detach() for one in (output, *self.auxiliary_outputs()))

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return what the caller gets to read, and the next call overwrites: the output, then `auxiliary_outputs`."""
        return (self._output, *self.auxiliary_outputs())

    def auxiliary_outputs(self) -> tuple[torch.Tensor, ...]:
        """Return what the last call gave beside its output."""
        return ()

    def _call(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._check_open()
        if self.ctx.debug_mode:
            self.ctx.agree("the operators the ranks call", f"{self} for {self.problem}")
            with self.ctx.collective_section(f"call {self}"):
                self._check_operands(a, b)
        else:
            self._check_operands(a, b)
        return self._launch(a, b)

    def as_matrix(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output of this operator as the matrix the family defines; a copy where the layout differs."""
        return output

    def close(self) -> None:
        """Give the buffers back; collective. The output must not be used after this."""
        self.is_closed = True

    def _check_open(self) -> None:
        self.ctx.check()
        if self.is_closed:
            raise RuntimeError(f"{self} was closed: its buffers were given back; make another")

    def describe_config(self) -> str:
        """Return what the last call ran with, for a table; behind the variant's name where that was chosen."""
        config = str(self.ran_config or "")
        return f"{self.chosen_by}: {self.variant} {config}".rstrip() if self.chosen_by else config

    def __str__(self) -> str:
        chosen = f" (chosen by {self.chosen_by})" if self.chosen_by else ""
        return f"{self.family}/{self.variant}{chosen}"

    def _check_kinds(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Raise for operands whose memory does not say all; part of every call, wherever the operands lie."""
        for name, tensor in (("A", a), ("B", b)):
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{self}: {name} is a {type(tensor).__name__}; it must be a torch.Tensor")
            if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
                raise ValueError(
                    f"{self}: {name} is a {type(tensor).__name__} of layout {tensor.layout}; it must be dense, of a "
                    "DTensor the to_local()"
                )
            if tensor.is_neg():
                raise ValueError(f"{self}: {name} is a negated view of its memory; give it as resolve_neg()")
        if reason := self.gradient_reason(a, b):
            raise ValueError(reason)

    def gradient_reason(self, a: torch.Tensor, b: torch.Tensor) -> str:
        """Return why operands cannot be taken, if it is that they require a gradient, or ""."""
        if torch.is_grad_enabled():
            for name, tensor in (("A", a), ("B", b)):
                if tensor.requires_grad:
                    return (
                        f"{self}: {name} requires a gradient, which an operator does not compute; call it under "
                        "torch.no_grad(), in a torch.autograd.Function, or with detach()"
                    )
        return ""

    def _check_operands(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._check_kinds(a, b)
        problem, device = self.problem, self.ctx.get_device()
        if a.ndim == 2 and b.ndim == 2 and a.shape[1] != b.shape[0]:
            raise ValueError(f"{self}: A is {tuple(a.shape)} and B is {tuple(b.shape)}; A's columns must be B's rows")
        for name, tensor, shape in (("A", a, problem.a_shape(self.rank)), ("B", b, problem.b_shape(self.rank))):
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{self}: {name} is {tuple(tensor.shape)} on rank {self.rank}; the operator was made for {shape} "
                    f"(M={problem.m}, N={problem.n}, K={problem.k} on {problem.world_size} ranks)"
                )
            if tensor.dtype != problem.dtype:
                raise ValueError(f"{self}: {name} is {tensor.dtype}; the operator was made for {problem.dtype}")
            if tensor.device != device:
                raise ValueError(f"{self}: {name} is on {tensor.device}; it must be on {device}")
            if self.keeps_outputs and self._overwrites(name, tensor):
                raise ValueError(
                    f"{self}: {name} lies in memory of this operator, which the call overwrites while it reads {name}; "
                    "give it as clone()"
                )

    def _overwrites(self, name: str, operand: torch.Tensor) -> bool:
        """Whether a call writes where this operand lies; `name` is "A" or "B"."""
        return overlap(operand, self._output)


def overlap(matrix: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a row of a matrix, or a column where these lie further apart, has bytes among those of another tensor.

    Of the other, all from its first element to its last count.
    """
    if not matrix.numel() or not other.numel():
        return False
    if matrix.data_ptr() >= _end_of_storage(other) or other.data_ptr() >= _end_of_storage(matrix):
        return False  # as in almost every call, where the rest would cost the host 2 us
    size = matrix.element_size()
    (lines, apart), (length, step) = sorted(zip(matrix.shape, matrix.stride(), strict=True), key=lambda dim: -dim[1])
    line_bytes = ((length - 1) * step + 1) * size
    first, end = _extent(other)
    before = first - matrix.data_ptr() - line_bytes  # a line that begins there, or before, ends before the other begins
    if not apart:
        lines = 1
    earliest = 0 if before < 0 else before // (apart * size) + 1 if apart else 1
    return earliest < lines and matrix.data_ptr() + earliest * apart * size < end


def _end_of_storage(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def lies_within(matrix: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all of a tensor is between the first and the last element of another."""
    (first, end), (others_first, others_end) = _extent(matrix), _extent(other)
    return others_first <= first and end <= others_end
