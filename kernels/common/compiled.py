"""Operators under `torch.compile`: a call is one step of the compiled graph, a custom op.

The compiler could not look into a call. The step names the operator by a tensor of its own, of which the address says
which it is: a number would make the compiler compile layers of one class once for each operator. What it returns is new
memory, to which the outputs are copied. The operator's own memory is overwritten where the compiler does not see it, so
its attributes cannot be read in a graph.

With ``mode="reduce-overhead"`` graphs of the compiler become CUDA graphs, calls in them, too. What these get from
outside must stay where it is, or it is copied, and a copy names no operator: the two tensors are said to stay.

All ranks must queue their calls in the same order, or they wait for each other for ever. The compiler may move steps
that do not depend on each other, by sizes that are a rank's own. So every call says that it overwrites a tensor, the
same in all calls of a context, and each depends on the one before.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from iris_core import Context

if TYPE_CHECKING:
    from .operator import Operator

_operators: weakref.WeakValueDictionary[int, Operator[Any]] = weakref.WeakValueDictionary()  # by address of the name
_names: list[torch.Tensor] = []  # all there were: no address means another operator later, which a graph may still call
_orders: weakref.WeakKeyDictionary[Context, torch.Tensor] = weakref.WeakKeyDictionary()


def name_of(operator: Operator[Any]) -> torch.Tensor:
    """Return a tensor by which graphs can name an operator, for as long as somebody keeps that."""
    name = _staying(torch.zeros(1, device=operator.ctx.get_device()))
    _operators[name.data_ptr()] = operator
    _names.append(name)
    return name


def order_in(ctx: Context) -> torch.Tensor:
    """Return what stands for the order of a context's calls."""
    if ctx not in _orders:
        _orders[ctx] = _staying(torch.zeros(1, device=ctx.get_device()))
    return _orders[ctx]


def _staying(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, marked as one that stays where it is.

    As `torch._dynamo.mark_static_address` marks it, without the second that it takes to import the compiler.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def _call(
    a: torch.Tensor, b: torch.Tensor, order: torch.Tensor, name: torch.Tensor, shape: list[int], other: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    operator = _operators.get(name.data_ptr())
    if operator is None:
        raise RuntimeError("a graph calls an operator that is not of this process, or that nobody has kept")
    with torch.no_grad():
        operator._call(a, b)
        output, *others = (output.clone(memory_format=torch.contiguous_format) for output in operator.outputs())
        return output, others[0] if others else output.new_empty(0)


def _fake_call(
    a: torch.Tensor, b: torch.Tensor, order: torch.Tensor, name: torch.Tensor, shape: list[int], other: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return a.new_empty(shape), a.new_empty(other)


# Defined by itself, not by `torch.library.custom_op`, whose way to what it runs takes the host four times as long.
_LIBRARY = torch.library.Library("iris_overlap", "DEF")
_LIBRARY.define(
    "call(Tensor a, Tensor b, Tensor(a!) order, Tensor name, SymInt[] shape, SymInt[] other) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("call", _call, "CompositeExplicitAutograd")
torch.library.register_fake("iris_overlap::call", _fake_call, lib=_LIBRARY)


def call_in_graph(operator: Operator[Any], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Add a call to the graph that is being compiled; return copies of the operator's outputs.

    The graph ends before a call whose operands require a gradient, which then raises as it would without the compiler,
    and before one of an operator that was closed, likewise, or that has no memory of its own for what it returns. Where
    it must not end, the compiler raises.
    """
    # Of a closed one also where the graph is there already, and would be replayed: it was made for one that is open.
    if not operator.keeps_outputs or operator.is_closed or operator.gradient_reason(a, b):
        return torch.compiler.disable(operator.call)(a, b)
    shape, *others = operator.output_shapes
    outputs = torch.ops.iris_overlap.call(a, b, operator.order, operator.name, shape, others[0] if others else [0])
    return outputs[: len(operator.output_shapes)]


class Overwritten:
    """An operator's attribute that calls overwrite, kept as ``_name``; to read it in a graph raises RuntimeError.

    The compiler would not know when it changes.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, operator: Operator[Any] | None, owner: type) -> Any:
        if operator is None:
            return self
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                f"an operator's {self._name} cannot be read in a graph of torch.compile, which does not know when a "
                "call overwrites it; take what the call returns, or what operator.call(a, b) does"
            )
        return getattr(operator, f"_{self._name}")

    def __set__(self, operator: Operator[Any], memory: torch.Tensor) -> None:
        setattr(operator, f"_{self._name}", memory)
