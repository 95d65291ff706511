"""Classes whose instances kernels make and call methods of, compiled and interpreted alike."""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

import triton.language as tl
from triton.runtime.jit import KernelInterface

from . import interpretation


class _Method:
    """A jit method of an aggregate. The compiler binds it to its object; in the interpreter this does."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None or not interpretation.is_enabled():
            return self._function
        return functools.partial(self._function, instance)


class _CacheKey:
    """A digest of a class's methods, and of all they call.

    Triton puts it into the key of a kernel that takes the class as an argument.
    """

    def __get__(self, instance: Any, owner: Any) -> str:
        keys = [member.cache_key for member in owner.hash_attrs]
        return hashlib.sha256("".join(keys).encode()).hexdigest()


def _attribute(self: Any, name: str) -> Any:
    """Return a constant as the plain number that constants are where kernels are interpreted.

    There an operation of Triton's constant and a tensor would give a constant that holds a tensor.
    """
    value = object.__getattribute__(self, name)
    return value.value if isinstance(value, tl.constexpr) and interpretation.is_enabled() else value


def aggregate(cls: Any) -> Any:
    """Make a class one that kernels can make instances of and call methods of, compiled or interpreted.

    Args:
        cls: has its fields as annotations, which must be types and not strings, a ``triton.constexpr_function`` as
            ``__init__``, and jit functions as methods.

    Returns:
        Triton's aggregate of it, whose methods can be called in the interpreter, too, and whose constants are plain
        numbers there. Triton binds methods only as it compiles, and drops those that were decorated for the
        interpreter.
    """
    if cls.__bases__ != (object,):  # ours only share methods; from Triton 3.8 on they would have to be aggregates
        methods = dict(inspect.getmembers(cls, lambda member: isinstance(member, KernelInterface)))
        cls = type(cls.__name__, (), methods | vars(cls))
    made = tl.core._aggregate(cls)
    for name, member in inspect.getmembers(cls):
        if isinstance(member, KernelInterface):
            setattr(made, name, _Method(member))
    made.cache_key = _CacheKey()
    made.__getattribute__ = _attribute
    return made
