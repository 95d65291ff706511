"""Atomics that Triton's interpreter lacks and GPUs have: floats exchanged, and bf16 added."""

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
    """Stand in for the interpreter's function, which refuses these."""
    dtype = values.dtype.scalar
    if operation == ATOMIC_OP.FADD and dtype is tl.bfloat16:
        return _add_bf16(pointers.data, values.data, mask.data, self.ir_sem_to_interpreter_sem[sem])
    if operation == ATOMIC_OP.XCHG and dtype.is_floating():
        word, kind = (np.int32, tl.int32) if dtype.primitive_bitwidth == 32 else (np.int64, tl.int64)
        bits = TensorHandle(values.data.view(word), kind)
        old = _update(self, operation, pointers, bits, mask, sem, scope).data
        return TensorHandle(old.view(values.data.dtype), dtype)
    return _update(self, operation, pointers, values, mask, sem, scope)


def _add_bf16(pointers: np.ndarray, values: np.ndarray, mask: np.ndarray, sem: Any) -> TensorHandle:
    """Add by compare and swap, word by word until no other has changed it meanwhile; return what was there."""
    old = native.load(pointers, mask, np.zeros_like(values), values.dtype)
    waiting = mask.astype(bool)
    while waiting.any():
        sums = as_bits(as_floats(old[waiting]) + as_floats(values[waiting]))
        seen = native.atomic_cas(pointers[waiting], old[waiting], sums, sem)
        has_failed = seen != old[waiting]
        old[waiting] = seen
        waiting[waiting] = has_failed
    return TensorHandle(old, tl.bfloat16)
