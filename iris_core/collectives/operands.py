"""What the collectives take: which tensors, which operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..context import Context

_OPERATIONS: dict[Any, str] = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
_OPERATIONS |= {name: name for name in _OPERATIONS.values()}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCED = (*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def operation(op: Any) -> str:
    """Return "sum", "max" or "min", given that or torch's.

    Raises:
        ValueError: it is none of these.
    """
    found = _OPERATIONS.get(op)
    if found is None:
        raise ValueError(f'op is {op!r}; it takes ReduceOp.SUM, MAX or MIN, or "sum", "max", "min"')
    return found


class Shape(NamedTuple):
    """What a collective takes and gives.

    Args:
        outputs, inputs: whether the output and the input have a part a member.
        scattered: whether members get different parts of an input.
        reduces: whether parts are combined.
    """

    outputs: bool = False
    inputs: bool = False
    scattered: bool = False
    reduces: bool = False


SHAPES = {
    "all_reduce": Shape(reduces=True),
    "all_gather": Shape(outputs=True),
    "reduce_scatter": Shape(inputs=True, scattered=True, reduces=True),
    "all_to_all": Shape(outputs=True, inputs=True, scattered=True),
    "broadcast": Shape(),
    "reduce": Shape(reduces=True),
    "gather": Shape(outputs=True),
    "scatter": Shape(inputs=True, scattered=True),
    "send": Shape(),
    "recv": Shape(),
}


@dataclass(frozen=True)
class Call:
    """A call of a collective.

    Args:
        name: of the collective.
        output, input: tensors; the same, where one is not needed on this rank.
        op: "sum", "max", "min", or "none".
        sender, receiver: index of the only member that sends or receives, or -1.
    """

    name: str
    output: torch.Tensor
    input: torch.Tensor
    op: str = "none"
    sender: int = -1
    receiver: int = -1

    def key(self) -> tuple[Any, ...]:
        """Return all that matters of the call but what is in the tensors.

        Raises:
            ValueError: they are no tensors.
        """
        output, given = self.output, self.input
        if not isinstance(output, torch.Tensor) or not isinstance(given, torch.Tensor):
            raise ValueError(f"{self.name} takes tensors, and was given {type(output)} and {type(given)}")
        return (
            *(self.name, self.op, self.sender, self.receiver, output.data_ptr(), given.data_ptr(), output.dtype),
            *(given.dtype, output.shape, given.shape, output.stride(), given.stride(), output.device, given.device),
            *(output.is_neg(), given.is_neg(), output.is_conj(), given.is_conj()),
        )

    def part(self, group_size: int) -> int:
        """Return how many elements a part has."""
        shape = SHAPES[self.name]
        if shape.outputs and shape.inputs:
            return self.input.numel() // group_size
        return min(self.input.numel(), self.output.numel())

    def describe(self, group_size: int) -> str:
        """Return what all ranks' calls must have in common."""
        combined = "" if self.op == "none" else f", {self.op}"
        roots = "".join(
            f", {name} {value}" for name, value in (("from", self.sender), ("to", self.receiver)) if value >= 0
        )
        return f"{self.name} of {self.part(group_size)} elements of {self.output.dtype} a part{combined}{roots}"

    def check(self, ctx: Context, group_size: int) -> None:
        """Raise unless the tensors fit.

        Raises:
            ValueError: they do not; says what would.
        """
        name, shape = self.name, SHAPES[self.name]
        for argument, tensor in (("output_tensor", self.output), ("input_tensor", self.input)):
            if tensor.device != ctx.get_device():
                raise ValueError(f"{name}: {argument} is on {tensor.device}; it takes a tensor on {ctx.get_device()}")
            if tensor.layout is not torch.strided or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: {argument}, {tuple(tensor.shape)} with strides {tensor.stride()}, is not contiguous; "
                    "its contiguous() is"
                )
            if tensor.is_neg() or tensor.is_conj():
                raise ValueError(
                    f"{name}: {argument} is negated or conjugated; its resolve_neg() or resolve_conj() is not"
                )
        if self.output.dtype != self.input.dtype:
            raise ValueError(
                f"{name}: an output of {self.output.dtype} and an input of {self.input.dtype} must be alike"
            )
        if shape.reduces and self.output.dtype not in REDUCED:
            listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCED)
            raise ValueError(f"{name} does not combine {self.output.dtype}; it takes {listed}")
        if self.output is self.input:
            return
        sizes = self.output.numel(), self.input.numel()
        outputs, inputs = (group_size if parts else 1 for parts in (shape.outputs, shape.inputs))
        has_parts = shape.outputs or shape.inputs
        if sizes[0] * inputs != sizes[1] * outputs or not (has_parts or self.output.shape == self.input.shape):
            whole = "as large as" if has_parts else "of the shape of"
            ratio = whole if outputs == inputs else f"{outputs} times" if outputs > 1 else f"one {inputs}th of"
            raise ValueError(
                f"{name}: an output of {tuple(self.output.shape)} and an input of {tuple(self.input.shape)}; "
                f"the output must be {ratio} the input, in a group of {group_size}"
            )
        if shape.outputs and shape.inputs and sizes[0] and (not self.input.ndim or self.input.shape[0] % group_size):
            raise ValueError(
                f"{name}: the first dimension of {tuple(self.input.shape)} is not a multiple of {group_size} ranks"
            )
