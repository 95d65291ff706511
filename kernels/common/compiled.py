"""Operators under `torch.compile`: a call is one step of the compiled graph, a custom op that writes its outputs.

The compiler could not look into a call. The step names the operator by a number, as a graph holds tensors and numbers
only, and the operator's own buffers as what it overwrites: what was read from them before is read before, and what
comes after sees what the call wrote, as without the compiler. Where the compiler gives it other memory, because it
wants to keep the buffers' old values, the outputs are copied there.

All ranks must queue their calls in the same order, or they wait for each other for ever. The compiler may move steps
that do not depend on each other, by sizes that are a rank's own. So every call says that it overwrites one more tensor,
the same in all calls of a context, and each depends on the one before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from iris_core import Context

if TYPE_CHECKING:
    from .operator import Operator

_numbers = itertools.count()
_operators: weakref.WeakValueDictionary[int, Operator[Any]] = weakref.WeakValueDictionary()
_orders: weakref.WeakKeyDictionary[Context, torch.Tensor] = weakref.WeakKeyDictionary()


def number_of(operator: Operator[Any]) -> int:
    """Return a number by which graphs can name an operator, for as long as somebody keeps it."""
    number = next(_numbers)
    _operators[number] = operator
    return number


def order_in(ctx: Context) -> torch.Tensor:
    """Return what stands for the order of a context's calls."""
    if ctx not in _orders:
        _orders[ctx] = torch.zeros(1, device=ctx.get_device())
    return _orders[ctx]


@torch.library.custom_op(
    "iris_overlap::call",
    mutates_args=("outputs", "order"),
    schema="(Tensor a, Tensor b, Tensor(a2!)[] outputs, Tensor(a3!) order, SymInt operator) -> ()",
)
def _call(
    a: torch.Tensor, b: torch.Tensor, outputs: Sequence[torch.Tensor], order: torch.Tensor, operator: int
) -> None:
    called = _operators.get(operator)
    if called is None:
        raise RuntimeError("a compiled graph calls an operator that nobody has kept; compile it again with another")
    with torch.no_grad():
        called(a, b)
        for output, own in zip(outputs, called.outputs(), strict=True):
            if output.data_ptr() != own.data_ptr():
                output.copy_(own)


@_call.register_fake
def _(a: torch.Tensor, b: torch.Tensor, outputs: Sequence[torch.Tensor], order: torch.Tensor, operator: int) -> None:
    return None


def call_in_graph(operator: Operator[Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add a call to the graph that is being compiled; return this rank's output.

    Where the operator has no buffers of its own for what it returns, the graph ends before the call.

    Raises:
        ValueError: an operand requires a gradient.
    """
    if not operator.keeps_outputs:
        return torch.compiler.disable(operator._call)(a, b)
    operator._refuse_gradients(a, b)
    outputs = operator.outputs()
    _call(a, b, list(outputs), operator.order, operator.number)
    return outputs[0]
