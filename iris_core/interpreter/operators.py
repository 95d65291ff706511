"""Operators between interpreted values of one type: numpy's at once, where Triton goes through a dozen calls.

Other pairs of types, and what Triton refuses, are left to Triton's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

ENDS = {f"int{bits}": 2 ** (bits - 1) for bits in (8, 16, 32, 64)}  # of integers: the first that is too large
_UNSIGNED = [f"u{name}" for name in ENDS]
_NUMBERS = {*ENDS, *_UNSIGNED, "fp32", "fp64"}
COMPUTED_AS_THEY_ARE = {"int1", *_NUMBERS}  # beside one of the same type
_INTEGERS = {"int1", *ENDS, *_UNSIGNED}

_NUMPY_INTEGERS = {name: np.dtype(name) for name in (*ENDS, *_UNSIGNED)}

Operator = Callable[[tl.tensor, Any], tl.tensor]

_broadcast_values = TritonSemantic.broadcast_impl_value
_cast = TritonSemantic.cast


def faster(name: str, general: Operator) -> Operator:
    """Return an operator of tensors that asks the general one for what it does not know, or that one itself.

    Args:
        name: what Python calls it, such as "__add__".
        general: the one of the patched language.
    """
    if name == "__getitem__":
        return _indexing(general)
    if name == "__add__":
        return _addition(_operator(general, np.add, _NUMBERS))
    if name in _COMPARISONS:
        return _operator(general, _COMPARISONS[name], COMPUTED_AS_THEY_ARE, tl.int1)
    if name in _OF_NUMBERS:
        return _operator(general, _OF_NUMBERS[name], _NUMBERS)
    if name in _OF_INTEGERS:
        return _operator(general, _OF_INTEGERS[name], _INTEGERS)
    return general


_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_OF_NUMBERS = {
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__rsub__": lambda one, other: np.subtract(other, one),
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__mod__": np.fmod,  # as C rounds, towards zero
}
_OF_INTEGERS = {
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "__floordiv__": lambda one, other: (one - np.fmod(one, other)) // other,
}


def _operator(general: Operator, function: Any, kinds: set[str], result: tl.dtype | None = None) -> Operator:
    """Return an operator for two of one of these kinds, or one and a number; `result` is the result's, if another."""

    def operate(self: tl.tensor, other: Any) -> tl.tensor:
        data, dtype = self.handle.data, self.dtype
        if type(other) is tl.tensor:
            if dtype is not other.dtype and dtype.name in ENDS and other.dtype.name in ENDS:
                dtype = max(dtype, other.dtype, key=_bits)
            elif dtype is not other.dtype or dtype.name not in kinds:
                return general(self, other)
            made = _joint_type(self, other, result or dtype)
            if made is None:
                return general(self, other)
            other = other.handle.data
        elif type(other) is int and data.ndim and 0 <= other < ENDS.get(dtype.name, 0):
            made = _with_element(self.type, result or dtype)
        else:
            return general(self, other)
        return tl.tensor(TensorHandle(function(data, other), made.scalar), made)

    return operate


def _addition(of_numbers: Operator) -> Operator:
    """Return an addition that also moves pointers, by integers with a sign."""

    def add(self: tl.tensor, other: Any) -> tl.tensor:
        dtype = self.dtype
        if type(dtype) is tl.pointer_type and type(other) is tl.tensor and other.dtype.name in ENDS:
            made = _joint_type(self, other, dtype)
            if made is not None:
                itemsize = max(1, dtype.element_ty.primitive_bitwidth // 8)
                moved = self.handle.data + itemsize * other.handle.data.astype(np.uint64)
                return tl.tensor(TensorHandle(moved, self.handle.dtype), made)
        return of_numbers(self, other)

    return add


def _indexing(general: Operator) -> Operator:
    """Return an indexing of blocks by whole slices and None, which add dimensions of size 1."""

    def index(self: tl.tensor, slices: Any) -> tl.tensor:
        data = self.handle.data
        if type(slices) is not tuple or not self.type.is_block() or not _adds_dimensions(slices, data.ndim):
            return general(self, slices)
        data = data[slices]
        return tl.tensor(TensorHandle(data, self.handle.dtype), tl.block_type(self.dtype, list(data.shape)))

    return index


def _adds_dimensions(slices: tuple[Any, ...], dimensions: int) -> bool:
    for one in slices:
        if type(one) is slice and one.start is one.stop is one.step is None:
            dimensions -= 1
        elif one is not None:
            return False
    return dimensions >= 0


def broadcast_values(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Stand in for the method that gives two values one shape."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    left, right = lhs.type, rhs.type
    if not left.is_block():
        return (_splat(lhs, right) if right.is_block() else lhs), rhs
    if not right.is_block():
        return lhs, _splat(rhs, left)
    shape = None
    if len(left.shape.values) == len(right.shape.values):
        shape = _joint_shape(tuple(left.shape.values), tuple(right.shape.values))
    if shape is None:
        return _broadcast_values(self, lhs, rhs)
    return _spread(lhs, shape), _spread(rhs, shape)


def _splat(scalar: tl.tensor, like: tl.block_type) -> tl.tensor:
    data = scalar.handle.data
    spread = np.full(like.shape.values, data, dtype=data.dtype)
    return tl.tensor(TensorHandle(spread, scalar.handle.dtype), _with_element(like, scalar.dtype))


def _spread(block: tl.tensor, shape: list[int]) -> tl.tensor:
    if block.type.shape.values == shape:
        return block
    spread = np.broadcast_to(block.handle.data, shape)
    return tl.tensor(TensorHandle(spread, block.handle.dtype), tl.block_type(block.dtype, shape))


def cast(
    self: TritonSemantic, input: tl.tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None
) -> tl.tensor:
    """Stand in for the method that gives a value another type, where it has it or both are integers."""
    dtype, wanted = input.dtype, dst_ty.scalar
    if dtype is wanted:
        return input
    into = _NUMPY_INTEGERS.get(wanted.name) if dtype.name in _NUMPY_INTEGERS else None
    if into is None or fp_downcast_rounding is not None or (dst_ty is not wanted and not input.type.is_block()):
        return _cast(self, input, dst_ty, fp_downcast_rounding)
    return tl.tensor(TensorHandle(input.handle.data.astype(into), wanted), _with_element(input.type, wanted))


def _bits(dtype: tl.dtype) -> int:
    return dtype.primitive_bitwidth


def _joint_type(one: tl.tensor, other: tl.tensor, element: tl.dtype) -> tl.dtype | None:
    """Return the type of such elements in the shape that two values have once they are spread; None if there is none.

    A scalar's data is an array of one, so numpy spreads it, too.
    """
    if one.shape is other.shape or not other.shape.values:
        return _with_element(one.type, element)
    if not one.shape.values:
        return _with_element(other.type, element)
    shape = _joint_shape(one.handle.data.shape, other.handle.data.shape)
    return shape and tl.block_type(element, shape)


@functools.cache
def _joint_shape(one: tuple[int, ...], other: tuple[int, ...]) -> list[int] | None:
    try:
        return list(np.broadcast_shapes(one, other))
    except ValueError:
        return None


def _with_element(type_: tl.dtype, element: tl.dtype) -> tl.dtype:
    if not type_.is_block():
        return element
    return type_ if type_.element_ty is element else tl.block_type(element, type_.shape)
