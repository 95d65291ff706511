"""Classes whose instances kernels make and call methods of, compiled and interpreted alike."""

from __future__ import annotations

import functools
from typing import Any

from triton.language.core import _aggregate
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ..device import interpretation


def aggregate(cls: type) -> Any:
    """Make a class one that kernels can use.

    Args:
        cls: has its fields as annotations, which must be types and not strings, a ``triton.constexpr_function`` as
            ``__init__``, and jit functions as methods.

    Returns:
        Triton's aggregate of it, whose methods can be called in the interpreter, too. Triton binds them only as it
        compiles, and drops those that were decorated for the interpreter.
    """
    made = _aggregate(cls)
    for name, member in vars(cls).items():
        if isinstance(member, (JITFunction, InterpretedFunction)):
            setattr(made, name, _Method(member))
    return made


class _Method:
    """A jit function that is bound where kernels are interpreted; the compiler binds it by itself."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None or not interpretation.is_enabled():
            return self._function
        return functools.partial(self._function, instance)
