"""Launches made again for operands that lie elsewhere: where operands' addresses are in what a call queues.

What a variant queues depends in three ways on where its operands lie: their addresses stand in arguments; it asks
whether they start on 16 bytes; and whether they lie on the heap, in the operator's own memory. So of two calls that are
alike in all else, whose operands start alike on 16 bytes and lie off the heap, one queues what the other does, with
other addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iris_core.backends.base import Step

from .kernels import ALIGNMENT_BYTES, Kinds, kind_of_descriptor, kind_of_integer, kind_of_tensor

Operands = Sequence[torch.Tensor]  # of a call, the memory of its output among them
Make = Callable[[Operands], Step]  # returns what queues a step of a call with these


@dataclass(frozen=True, slots=True)
class Within:
    """A place in an operand: in which, and how many bytes behind its start."""

    operand: int
    offset: int

    def address(self, operands: Operands) -> int:
        """Return where that is."""
        return operands[self.operand].data_ptr() + self.offset


class _Address:
    """Stands for a tensor in a descriptor."""

    __slots__ = ("address",)

    def __init__(self, address: Any) -> None:
        self.address = address

    def data_ptr(self) -> Any:
        return self.address


class Spans:
    """Which addresses are operands', while a call is prepared.

    Args:
        operands: the call's; none, for a call that is not made again with others.

    Attributes:
        num_found: how many tensors were found in them.
    """

    def __init__(self, operands: Operands) -> None:
        self.operands = operands
        self.num_found = 0
        self._spans = [*map(_span, operands)]

    @property
    def are_apart(self) -> bool:
        """Whether an address is in one of them at most."""
        are_apart, before = True, 0
        for first, end in sorted(self._spans):  # no comprehension: a frame, a span
            are_apart = are_apart and (first >= before or first == end)
            before = max(before, end)
        return are_apart

    def within(self, tensor: Any) -> Within | None:
        """Return where in an operand a tensor starts; None if it does in none."""
        address = tensor.data_ptr()
        for index, (first, end) in enumerate(self._spans):
            if first <= address < end:
                self.num_found += 1
                return Within(index, address - first)
        return None

    def places(self, arguments: Iterable[Any], kinds: Kinds) -> list[Any]:
        """Return a kernel's arguments with an address, or a place in an operand, for each tensor; note their kinds."""
        found, integers, others = [], kinds.integers, kinds.others
        for argument in arguments:  # some forty a launch, most of them integers
            kind = type(argument)
            if kind is int:
                if -(1 << 31) <= argument < 1 << 31:  # as `kind_of_integer`, without a frame for each
                    integers.append(1 if argument == 1 else 0 if argument % ALIGNMENT_BYTES else ALIGNMENT_BYTES)
                else:
                    integers.append(kind_of_integer(argument))
                others.append(kind)
            elif isinstance(argument, tuple):
                others.append(len(argument))
                argument = tuple(self.places(argument, kinds))
            elif argument is not None and hasattr(argument, "data_ptr"):
                others.append(kind_of_tensor(argument))
                argument = self.within(argument) or argument.data_ptr()
            elif hasattr(argument, "block_shape"):
                others.append(kind_of_descriptor(argument))
                argument = _based(argument, self.within(argument.base) or argument.base.data_ptr())
            else:  # None, a flag, an op of an epilogue
                others.append(argument)
            found.append(argument)
        return found


def placed(spans: Spans, kernel: Any, arguments: Mapping[str, Any], kinds: Kinds) -> tuple[list[Any], list[int]]:
    """Return a kernel's arguments, in order, with places for tensors, and the indices of those in operands.

    Args:
        spans: the operands'.
        kernel: the jit function.
        arguments: by name.
        kinds: notes what they are; compile-time ones themselves.
    """
    places, moved = [], []
    for index, param in enumerate(kernel.params):
        argument = arguments[param.name]
        if param.is_constexpr:
            kinds.others.append(argument)
        else:
            before = spans.num_found
            (argument,) = spans.places((argument,), kinds)
            if spans.num_found > before:
                moved.append(index)
        places.append(argument)
    return places, moved


def movable(
    spans: Spans, places: list[Any], moved: list[int], launching: Callable[[list[Any]], Step]
) -> tuple[Step, Make | None]:
    """Return a launch, and what makes it for other operands; None if it does not depend on them.

    Args:
        spans: the operands'.
        places, moved: as `placed` gives them.
        launching: prepares a launch with arguments that have addresses.
    """
    if not moved:
        return launching(places), None

    def make(operands: Operands) -> Step:
        now = places.copy()
        for index in moved:
            now[index] = _at(places[index], operands)
        return launching(now)

    return make(spans.operands), make


def movable_copy(spans: Spans, src: torch.Tensor, copying: Callable[[torch.Tensor], Step]) -> Make | None:
    """Return what makes a copy of a part of an operand for other operands; None if `src` is no part of one.

    Args:
        spans: the operands'.
        src: a matrix.
        copying: prepares a copy of one to where this one goes.
    """
    place = spans.within(src)
    if place is None:
        return None
    shape, strides, behind = src.shape, src.stride(), place.offset // src.element_size()

    def make(operands: Operands) -> Step:
        operand = operands[place.operand]
        return copying(operand.as_strided(shape, strides, operand.storage_offset() + behind))

    return make


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    if not tensor.numel():
        return first, first
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return first, first + (last + 1) * tensor.element_size()


def _at(argument: Any, operands: Operands) -> Any:
    kind = type(argument)
    if kind is int or argument is None:  # most are
        return argument
    if kind is Within:
        return argument.address(operands)
    if kind is tuple:
        return tuple([_at(one, operands) for one in argument])
    if hasattr(argument, "block_shape"):
        return _based(argument, _at(argument.base.address, operands))
    return argument


def _based(descriptor: Any, address: Any) -> Any:
    """Return a descriptor of what lies at an address; its checks were made of another, and it keeps no memory."""
    based = object.__new__(type(descriptor))
    vars(based).update(vars(descriptor), base=_Address(address))
    return based
