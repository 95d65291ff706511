"""Running Triton kernels on the CPU, in Triton's own interpreter.

Triton decides at decoration, from ``TRITON_INTERPRET``, whether a kernel is compiled or interpreted. A program that
makes its heap in host memory has usually decorated its kernels by then, so this switches them over where they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_interpreted: dict[JITFunction, InterpretedFunction] = {}


def is_enabled() -> bool:
    """Return whether kernels of this process are interpreted."""
    return bool(triton.knobs.runtime.interpret)


def enable() -> None:
    """Interpret every Triton kernel of this process from now on, also those decorated earlier.

    Raises:
        RuntimeError: the installed numpy is too new for the interpreter of this Triton.
    """
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        raise RuntimeError(
            f"Triton {triton.__version__}'s interpreter does not work with numpy {np.__version__}; "
            "running without a GPU needs numpy<2.4"
        )
    triton.knobs.runtime.interpret = True
    JITFunction.run = _run
    JITFunction.__call__ = _call


def _as_interpreted(kernel: JITFunction) -> InterpretedFunction:
    if kernel not in _interpreted:
        _interpreted[kernel] = InterpretedFunction(kernel.fn)
    return _interpreted[kernel]


def _run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    return _as_interpreted(self).run(*args, grid=grid, warmup=warmup, **kwargs)


def _call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    return _as_interpreted(self)(*args, **kwargs)
