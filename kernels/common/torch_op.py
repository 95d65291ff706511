"""Operators under `torch.compile`: a call is one node of the compiled graph, a functional custom op.

Dynamo does not trace into a call. The node names its operator by a tensor whose address says which one it is: a number
would be a guard, and layers of one class would be compiled once for each operator. The op returns new memory, to which
the outputs are copied; the operator's own memory is overwritten where the compiler does not see it, so its attributes
cannot be read in a graph. With ``mode="reduce-overhead"`` calls become part of CUDA graphs; the tensor that names the
operator is marked static, or it would be copied, and a copy names no operator.

All ranks must queue their calls in the same order. The graph that AOTAutograd makes has the calls in program order, and
backends that run it node by node keep that. Inductor's scheduler reorders nodes that do not depend on each other by
sizes, which differ between ranks; it keeps collectives in the order of the graph (`decide_global_ordering_of_comms`).
So calls are lowered as what inductor takes for a collective: ordered among themselves and with functional collectives
(``torch.ops._c10d_functional``). No argument is mutated: AOTAutograd saves a mutated argument for the backward pass,
where the next call would have changed its version.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from iris_core import Context

_NAME_BYTES = 16  # inductor copies the inputs of CUDA graphs that do not start on a multiple of 16
_NAMES_OF_A_BLOCK = 4096


class Operator(Protocol):
    """What a graph needs of an operator; see `operator.Operator`."""

    ctx: Context
    name: torch.Tensor
    keeps_outputs: bool
    is_closed: bool

    @property
    def output_shapes(self) -> Any:
        """Of what a call returns."""

    def gradient_reason(self, a: torch.Tensor, b: torch.Tensor) -> str | None:
        """Return why operands cannot be used where gradients are kept, or None."""

    def call(self, a: torch.Tensor, b: torch.Tensor, *, m: int | None = None) -> tuple[torch.Tensor, ...]:
        """Make a call; return its outputs."""

    def has_whole(self, a: torch.Tensor, m: int | None) -> bool:
        """Return whether a call with this A is of as many rows as the operator was made for."""

    def _call(self, a: torch.Tensor, b: torch.Tensor, m: int | None) -> tuple[torch.Tensor, ...]: ...


_operators: weakref.WeakValueDictionary[int, Operator] = weakref.WeakValueDictionary()  # by address of the name


def name_of(operator: Operator) -> torch.Tensor:
    """Return a tensor by which graphs name an operator for as long as the operator lives.

    No address is given twice: a recorded graph may still hold it.
    """
    name = _marked_static(next(_names_on(operator.ctx.get_device())))
    _operators[name.data_ptr()] = operator
    return name


@functools.cache
def _names_on(device: torch.device) -> Iterator[torch.Tensor]:
    """Return an endless supply of names on a device, and keep their memory."""

    def names() -> Iterator[torch.Tensor]:
        kept: list[torch.Tensor] = []
        while True:
            kept.append(torch.zeros(_NAMES_OF_A_BLOCK, _NAME_BYTES, dtype=torch.uint8, device=device))
            yield from (kept[-1][place] for place in range(_NAMES_OF_A_BLOCK))

    return names()


def _marked_static(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, marked as one whose address does not change.

    As `torch._dynamo.mark_static_address` marks it, without the second that it takes to import the compiler.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def _call(
    a: torch.Tensor, b: torch.Tensor, name: torch.Tensor, shape: list[int], other: list[int]
) -> list[torch.Tensor]:
    operator = _operators.get(name.data_ptr())
    if operator is None:
        raise RuntimeError("a graph calls an operator that is not of this process, or that no longer exists")
    with torch.no_grad():
        outputs = operator._call(a, b, None)
        return [output.clone(memory_format=torch.contiguous_format) for output in outputs]


def _fake_call(
    a: torch.Tensor, b: torch.Tensor, name: torch.Tensor, shape: list[int], other: list[int]
) -> list[torch.Tensor]:
    if "torch._inductor.lowering" in sys.modules:  # by now imported, if inductor is what compiles this graph
        _lower_as_collective()
    return [a.new_empty(sizes) for sizes in (shape, other) if sizes]


# Defined by itself, not by `torch.library.custom_op`, whose way to what it runs takes the host four times as long.
_LIBRARY = torch.library.Library("iris_overlap", "DEF")
_LIBRARY.define(
    "call(Tensor a, Tensor b, Tensor name, SymInt[] shape, SymInt[] other) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_LIBRARY.impl("call", _call, "CompositeExplicitAutograd")
torch.library.register_fake("iris_overlap::call", _fake_call, lib=_LIBRARY)


@functools.cache
def _lower_as_collective() -> None:
    """Have inductor lower calls to the kind of node whose order it keeps."""
    from torch._inductor import ir, lowering

    op = torch.ops.iris_overlap.call.default

    def lower(*args: Any) -> list[Any]:
        outputs: Any = ir._CollectiveKernel.create_out_of_place(op, *args)
        return [ir.TensorBox.create(output) for output in outputs]

    lowering.add_needs_realized_inputs(op)
    lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def call_in_graph(
    operator: Operator, a: torch.Tensor, b: torch.Tensor, m: int | None = None
) -> tuple[torch.Tensor, ...]:
    """Add a call to the graph that is being compiled; return copies of the operator's outputs.

    The graph ends before a call whose operands require a gradient, which then raises as it would without the compiler,
    and before one of an operator that was closed, likewise, or that has no memory of its own for what it returns, or of
    fewer rows than it was made for. Where it must not end, the compiler raises.
    """
    # Of a closed one also where the graph is there already, and would be replayed: it was made for one that is open.
    is_other = not operator.keeps_outputs or operator.is_closed or not operator.has_whole(a, m)
    if is_other or operator.gradient_reason(a, b):
        return torch.compiler.disable(operator.call)(a, b, m=m)
    shape, *others = operator.output_shapes
    return tuple(torch.ops.iris_overlap.call(a, b, operator.name, shape, others[0] if others else []))


class Overwritten:
    """An operator's attribute that calls overwrite, kept as ``_name``; to read it in a graph raises RuntimeError.

    The compiler would not know when it changes.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, operator: Operator | None, owner: type) -> Any:
        if operator is None:
            return self
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                f"an operator's {self._name} cannot be read in a graph of torch.compile, which does not know when a "
                "call overwrites it; take what the call returns, or what operator.call(a, b) does"
            )
        return getattr(operator, f"_{self._name}")

    def __set__(self, operator: Operator, memory: torch.Tensor) -> None:
        setattr(operator, f"_{self._name}", memory)
