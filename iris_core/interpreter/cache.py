"""What Triton's interpreter works out anew for every value and every launch, kept: that is more than half of its work.

Each function stands in for one of Triton's own, and asks that one for what it has not met yet.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

_EVERY_MODULE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # kernels use one, Triton's own functions both

_init_block_type = tl.block_type.__init__
_get_np_dtype = triton_interpreter._get_np_dtype

_blocks: dict[tuple[str, tuple[int, ...]], tuple[tl.tuple, int, str]] = {}
_np_dtypes: dict[str, np.dtype] = {}
_language: list[tuple[Any, str, Any]] = []


def init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """Stand in for ``block_type.__init__``: types of one name share a shape, which nobody changes."""
    key = element_ty.name, tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if key not in _blocks:
        _init_block_type(self, element_ty, shape)  # raises if there is no such block
        _blocks[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _blocks[key]


def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Stand in for ``tensor.__init__``: blocks of one size share a shape, which nobody changes."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _shape(tuple(type.shape.values) if type.is_block() else ())


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def get_np_dtype(type: tl.dtype) -> np.dtype:
    """Stand in for the interpreter's function, which lists all types to find one."""
    if type.name not in _np_dtypes:
        _np_dtypes[type.name] = _get_np_dtype(type)
    return _np_dtypes[type.name]


def _index(self: tl.tensor) -> int:
    """Stand in for the interpreter's, whose ``int(array)`` numpy has deprecated; a scalar is an array of one."""
    return self.handle.data.item()


def patched_language() -> Any:
    """Let the language's functions interpret; its `restore` ends that. It must not be so already.

    Triton looks through the whole language for what to replace, and makes each replacement, at every launch.
    """
    if not _language:
        scope = triton_interpreter._patch_lang(_EVERY_MODULE)
        scope.set_attr(tl.tensor, "__index__", _index)
        _language.extend((owner, name, getattr(owner, name)) for owner, name, _ in scope._changes)
        return scope
    scope = triton_interpreter._LangPatchScope()
    for change in _language:
        scope.set_attr(*change)
    return scope
