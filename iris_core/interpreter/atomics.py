"""Atomics as GPUs have them, where Triton's interpreter does not: floats exchanged, added in 16 bits, and fp64 minima.

It refuses the first and bf16; an addition of fp16 that another process's comes between is lost; a minimum is right in
memory, and what was there before is not returned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton.ir import ATOMIC_OP
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from .bfloat16 import as_bits, as_floats

_update, _select = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_select


def create_atomic_rmw(
    self: InterpreterBuilder, operation: Any, pointers: Any, values: Any, mask: Any, sem: Any, scope: Any
) -> TensorHandle:
    """Stand in for the interpreter's function."""
    dtype = values.dtype.scalar
    if operation == ATOMIC_OP.FADD and dtype.primitive_bitwidth == 16:
        return _add(pointers.data, values, mask.data, self.ir_sem_to_interpreter_sem[sem])
    if operation == ATOMIC_OP.XCHG and dtype.is_floating():
        word, kind = (np.int32, tl.int32) if dtype.primitive_bitwidth == 32 else (np.int64, tl.int64)
        bits = TensorHandle(values.data.view(word), kind)
        old = _update(self, operation, pointers, bits, mask, sem, scope).data
        return TensorHandle(old.view(values.data.dtype), dtype)
    return _update(self, operation, pointers, values, mask, sem, scope)


def create_select(self: InterpreterBuilder, condition: Any, one: Any, other: Any) -> TensorHandle:
    """Stand in for the interpreter's function.

    Of `atomic_min` in fp64 Triton selects among bits as signed and as unsigned numbers, which NumPy would make floats.
    """
    if one.data.dtype != other.data.dtype and one.data.dtype.itemsize == other.data.dtype.itemsize:
        other = TensorHandle(other.data.view(one.data.dtype), one.dtype)
    return _select(self, condition, one, other)


OPERATIONS = {"create_select": create_select}  # beside atomics themselves


def _add(pointers: np.ndarray, values: TensorHandle, mask: np.ndarray, sem: Any) -> TensorHandle:
    """Add by compare and swap, word by word until no other has changed it meanwhile; return what was there."""
    plus = _plus_bf16 if values.dtype.scalar is tl.bfloat16 else _plus_fp16
    addends = values.data.view(np.uint16)
    old = native.load(pointers, mask, np.zeros_like(addends), addends.dtype)
    waiting = mask.astype(bool)
    while waiting.any():
        seen = native.atomic_cas(pointers[waiting], old[waiting], plus(old[waiting], addends[waiting]), sem)
        has_failed = seen != old[waiting]
        old[waiting] = seen
        waiting[waiting] = has_failed
    return TensorHandle(old.view(values.data.dtype), values.dtype.scalar)


def _plus_bf16(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return as_bits(as_floats(one) + as_floats(other))


def _plus_fp16(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one.view(np.float16) + other.view(np.float16)).view(np.uint16)
