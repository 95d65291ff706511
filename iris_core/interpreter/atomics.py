"""Atomics as GPUs have them, where Triton's interpreter does not: floats exchanged, and floats of 16 bits added.

It refuses the former and bf16; an addition of fp16 that another process's comes between is lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton.ir import ATOMIC_OP
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from .bfloat16 import as_bits, as_floats

_update = InterpreterBuilder.create_atomic_rmw


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
