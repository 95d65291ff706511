"""What Gluon of Triton 3.6 to 3.9 has under several names.

| here | newest | before |
|---|---|---|
| `thread_barrier()`, of a partition's threads | ``gl.barrier``, from 3.7 | ``gl.thread_barrier`` |
| `tma_load(descriptor, place, barrier, memory)` | ``tma.async_load``, from 3.8 | ``tma.async_copy_global_to_shared`` |
| `tma_store(descriptor, place, memory)` | ``tma.async_store``, from 3.8 | ``tma.async_copy_shared_to_global`` |
| `reinterpret(memory, dtype, shape, layout)` | a method of memory, from 3.9 | ``memory._reinterpret`` |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def _named(owner: Any, *names: str) -> Callable[..., Any]:
    """Return what `owner` has under the first of these names that the installed Triton knows."""
    return getattr(owner, next(name for name in names if hasattr(owner, name)))


thread_barrier = _named(gl, "barrier", "thread_barrier")
tma_load = _named(tma, "async_load", "async_copy_global_to_shared")
tma_store = _named(tma, "async_store", "async_copy_shared_to_global")
reinterpret = _named(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
