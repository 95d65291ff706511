"""What Triton's interpreter works out anew for every value and every launch, kept: that is more than half of its work.

Each function stands in for one of Triton's own, and asks that one for what it has not met yet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter

from .operators import COMPUTED_AS_THEY_ARE, ENDS, faster

_EVERY_MODULE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # kernels use one, Triton's own functions both

_check_operands = TritonSemantic.binary_op_type_checking_impl
_convert_float = triton_interpreter._convert_float
_init_block_type = tl.block_type.__init__
_get_np_dtype = triton_interpreter._get_np_dtype
_to_tensor = TritonSemantic.to_tensor
_unwrap_if_constexpr = tl.core._unwrap_if_constexpr

_FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_WIDER = {"fp16": (torch.float16, np.uint16), "fp32": (torch.float32, np.uint32)}

_blocks: dict[tuple[str, tuple[int, ...]], tuple[tl.tuple, int, str]] = {}
_np_dtypes: dict[str, np.dtype] = {}
_language: list[tuple[Any, str, Any]] = []


def init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """Stand in for ``block_type.__init__``: types of one name share a shape, which is never changed."""
    sizes = shape.values if type(shape) is tl.tuple else shape
    key = element_ty.name, tuple([size.value if type(size) is tl.constexpr else size for size in sizes])
    if key not in _blocks:
        _init_block_type(self, element_ty, shape)  # raises if there is no such block
        _blocks[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _blocks[key]


def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Stand in for ``tensor.__init__``: blocks of one size share a shape, which is never changed."""
    self.handle = handle
    self.type = type
    if type.is_block():
        self.dtype = type.element_ty
        self.shape, self.numel = _shape(tuple(type.shape.values))
    else:
        self.dtype = type
        self.shape, self.numel = _NO_SHAPE


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


_NO_SHAPE = _shape(())


def check_operands(
    self: TritonSemantic,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[tl.tensor, tl.tensor]:
    """Stand in for the method that gives two operands one type and shape, where they have them or easily get them."""
    if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
        left, right = lhs.dtype.name, rhs.dtype.name
        if (left == right and left in COMPUTED_AS_THEY_ARE) or (allow_lhs_ptr and right in ENDS and lhs.dtype.is_ptr()):
            return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
    elif not arithmetic_check:  # numbers keep a type of their own
        pass
    elif type(rhs) is int and isinstance(lhs, tl.tensor) and 0 <= rhs < ENDS.get(lhs.dtype.name, 0):
        return lhs, _constant(rhs, lhs)
    elif type(lhs) is int and isinstance(rhs, tl.tensor) and 0 <= lhs < ENDS.get(rhs.dtype.name, 0):
        return _constant(lhs, rhs), rhs
    return _check_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _constant(value: int, like: tl.tensor) -> tl.tensor:
    data = np.full(like.handle.data.shape or 1, value, get_np_dtype(like.dtype))
    return tl.tensor(triton_interpreter.TensorHandle(data, like.dtype), like.type)


def convert_float(given: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> np.ndarray:
    """Stand in for the interpreter's function, which takes numbers apart: bf16 is the upper half of fp32.

    Where that does not round, as it does not when it makes bf16 of fp32, and right for subnormal numbers, too. To fp8
    torch rounds, to nearest even; the largest number stands for all past it, as on GPUs. The interpreter's function
    would lose the carry of what it rounds up to a power of two, and of fp8 take a NaN for a number.
    """
    if (source.name, target.name, rounding_mode) == ("bf16", "fp32", None):
        return given.astype(np.uint32, order="C") << 16
    if (source.name, target.name, rounding_mode) == ("fp32", "bf16", None):
        return (given.view(np.uint32) >> 16).astype(np.uint16, order="C")
    if source.name == "fp32" and target.name in _FP8:
        if not given.view(np.uint32).any():  # as what a load's mask leaves out
            return np.zeros(given.shape, np.uint8)
        dtype = _FP8[target.name]
        largest = torch.finfo(dtype).max
        numbers = torch.from_numpy(given.view(np.float32).copy()).clamp(-largest, largest)
        return numbers.to(dtype).view(torch.uint8).numpy()
    if source.name in _FP8 and target.name in _WIDER:
        return _every_fp8(source.name, target.name)[given]
    return _convert_float(given, source, target, rounding_mode)


@functools.cache
def _every_fp8(source: str, target: str) -> np.ndarray:
    """Return what each byte of a format of fp8 stands for, as bits of a wider one."""
    wider, bits = _WIDER[target]
    return torch.arange(256, dtype=torch.uint8).view(_FP8[source]).to(wider).numpy().view(bits)


def to_tensor(self: TritonSemantic, x: Any, check_type: bool = True) -> Any:
    """Stand in for the method, through which every assignment goes."""
    return x if type(x) is tl.tensor else _to_tensor(self, x, check_type)


def unwrap_if_constexpr(value: Any) -> Any:
    """Stand in for the function, through which every operand goes."""
    kind = type(value)
    if kind in _NEVER_CONSTEXPR:
        return value
    return value.value if kind is tl.constexpr else _unwrap_if_constexpr(value)


_NEVER_CONSTEXPR = {tl.tensor, int, bool, float, type(None)}


def init_handle(self: triton_interpreter.TensorHandle, data: Any, dtype: tl.dtype, attr: Any = None) -> None:
    """Stand in for ``TensorHandle.__init__``, with its check."""
    self.data = data
    self.dtype = dtype
    self.attr = {} if attr is None else attr
    if type(dtype) is not tl.pointer_type and data.itemsize > max(1, dtype.primitive_bitwidth // 8):
        self.__post_init__()  # raises


def get_np_dtype(type: tl.dtype) -> np.dtype:
    """Stand in for the interpreter's function, which lists all types to find one."""
    if type.name not in _np_dtypes:
        _np_dtypes[type.name] = _get_np_dtype(type)
    return _np_dtypes[type.name]


def _index(self: tl.tensor) -> int:
    """Stand in for the interpreter's, whose ``int(array)`` numpy has deprecated; a scalar is an array of one."""
    return self.handle.data.item()


_BUILTIN = tl.core.builtin(lambda: None).__code__


def _interpreted(owner: Any, name: str, original: Any) -> Any:
    """Return what stands for a function of the language: without the calls through which Triton hands itself on."""
    function = getattr(owner, name)
    is_handed_on = getattr(function, "__kwdefaults__", None) == {"member": original}  # a builtin
    if is_handed_on and getattr(original, "__code__", None) is _BUILTIN:
        function = _given_semantic(original.__wrapped__)
    return faster(name, function) if owner is tl.tensor else function


def _given_semantic(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = triton_interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


def patched_language() -> Any:
    """Let the language's functions interpret; its `restore` ends that. It must not be so already.

    Triton looks through the whole language for what to replace, and makes each replacement, at every launch.
    """
    if not _language:
        scope = triton_interpreter._patch_lang(_EVERY_MODULE)
        for owner, name, original in [*scope._changes]:
            setattr(owner, name, _interpreted(owner, name, original))
        scope.set_attr(tl.tensor, "__index__", _index)
        _language.extend((owner, name, getattr(owner, name)) for owner, name, _ in scope._changes)
        return scope
    scope = triton_interpreter._LangPatchScope()
    for change in _language:
        scope.set_attr(*change)
    return scope
