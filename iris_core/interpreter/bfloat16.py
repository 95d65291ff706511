"""Arithmetic of bf16, which Triton's interpreter does on the bits as if they were integers; here in fp32.

Results are truncated to bf16, as the interpreter does wherever it makes bf16 of fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

from .cache import convert_float

_COMPARISONS = [f"create_fcmp{order}{name}" for order in "OU" for name in ("LT", "GT", "LE", "GE", "EQ", "NE")]
_ARITHMETIC = ["create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_frem", "create_fma", "create_clampf"]
# From Triton 3.8 on; before, -x is 0 - x.
_NEGATION = [name for name in ["create_fneg"] if hasattr(InterpreterBuilder, name)]
_EXTREMES = ["create_minimumf", "create_minnumf", "create_maximumf", "create_maxnumf"]


def is_bf16(operand: Any) -> bool:
    """Return whether a handle is of bf16."""
    return isinstance(operand, TensorHandle) and operand.dtype.scalar is tl.bfloat16


def as_floats(bits: np.ndarray) -> np.ndarray:
    """Return the values of bf16's bits, as fp32."""
    return convert_float(bits, tl.bfloat16, tl.float32, None).view(np.float32)


def as_bits(floats: np.ndarray) -> np.ndarray:
    """Return the bits of bf16 that fp32 is truncated to."""
    return convert_float(floats.astype(np.float32, order="C", copy=False), tl.float32, tl.bfloat16, None)


def widened(operand: Any) -> Any:
    """Return a handle of bf16 as one of fp32, anything else as it is."""
    return TensorHandle(as_floats(operand.data), tl.float32) if is_bf16(operand) else operand


def get_bf16(self: InterpreterBuilder, value: float) -> TensorHandle:
    """Return a constant, which the interpreter makes of every other dtype."""
    return TensorHandle(as_bits(np.array([value])), tl.bfloat16)


def _in_fp32(name: str) -> Callable[..., Any]:
    original = getattr(InterpreterBuilder, name)

    def operate(self: InterpreterBuilder, *operands: Any) -> Any:
        if not any(map(is_bf16, operands)):
            return original(self, *operands)
        result = original(self, *map(widened, operands))
        # What compares gives booleans; a product's fp32 is its accumulator's.
        return TensorHandle(as_bits(result.data), tl.bfloat16) if result.data.dtype == np.float32 else result

    return operate


_multiply = InterpreterBuilder.create_dot
_cast = InterpreterBuilder.cast_impl


def _create_dot(self: InterpreterBuilder, a: Any, b: Any, acc: Any, *how: Any) -> Any:
    return _multiply(self, widened(a), widened(b), acc, *how)


def _cast_impl(self: InterpreterBuilder, source: Any, target: Any) -> Any:
    """Stand in for the interpreter's function, which makes bf16 of fp32 alone."""
    if is_bf16(source):
        return _cast(self, widened(source), target)
    if target.scalar is tl.bfloat16:
        return TensorHandle(as_bits(source.data), tl.bfloat16)
    return _cast(self, source, target)


_sum = ReduceOps.sum


def sum_values(self: ReduceOps, operand: tl.tensor) -> tl.tensor:
    """Stand in for the method by which `tl.sum` is done at once."""
    if not is_bf16(operand.handle):
        return _sum(self, operand)
    total = np.sum(as_floats(operand.handle.data), axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(as_bits(np.asarray(total)), operand.dtype)


def _scanning(name: str) -> Callable[..., Any]:
    original, accumulate = getattr(ScanOps, name), getattr(np, name)

    def scan(self: ScanOps, operand: tl.tensor) -> list[tl.tensor]:
        if not is_bf16(operand.handle):
            return original(self, operand)
        running = accumulate(as_floats(operand.handle.data), axis=self.axis)
        return [self.to_tensor(as_bits(running), operand.dtype)]

    return scan


# The methods by which `tl.cumsum` and `tl.cumprod` are done at once. Before Triton 3.9 both made fp32 of bf16.
SCANS: dict[str, Callable[..., Any]] = {name: _scanning(name) for name in ("cumsum", "cumprod")}

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _in_fp32(name) for name in _COMPARISONS + _ARITHMETIC + _NEGATION + _EXTREMES},
    "create_dot": _create_dot,
    "cast_impl": _cast_impl,
    "get_bf16": get_bf16,
}
