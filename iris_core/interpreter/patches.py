"""Running Triton kernels on the CPU: Triton's own interpreter, with the programs of a grid taking turns.

Triton decides at decoration, from ``TRITON_INTERPRET``, whether a kernel is compiled or interpreted. A program that
makes its heap in host memory has usually decorated its kernels by then, so this switches them over where they are.

Triton's interpreter runs the programs of a grid one after the other. A persistent kernel whose programs wait for one
another, or for programs of other ranks, would never end; here a program that polls lets the others go on, as they do
on a GPU: it says so (`intrinsics.pause`), or is found to (polling.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, ReduceOps, ScanOps
from triton.runtime.jit import JITFunction

from ..device import interpretation
from . import atomics, bfloat16, cache, operators
from .executor import Executor, ProcessExecutor
from .libdevice import INTERPRETED
from .memory_bounds import is_volatile_load

# By the function a kernel was made of: a kernel's own hash reads the source of all it calls.
_interpreted: dict[Callable[..., Any], InterpretedFunction] = {}
_process = ProcessExecutor()
_executor: Executor = _process


def patch_triton() -> None:
    """Make Triton interpret kernels that are decorated already, and run their grids by the executor.

    Raises:
        RuntimeError: the installed numpy is too new for the interpreter of this Triton.
    """
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        raise RuntimeError(
            f"Triton {triton.__version__}'s interpreter does not work with numpy {np.__version__}; "
            "running without a GPU needs numpy<2.4"
        )
    # Integer arithmetic is not checked for overflow, as it is not on a GPU: the checks take half of the time.
    builder = triton_interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    JITFunction.run = _run
    JITFunction.__call__ = _call
    InterpretedFunction.__call__ = _call_interpreted
    GridExecutor.__call__ = _run_grid
    tl.tensor.__init__ = cache.init_tensor
    tl.block_type.__init__ = cache.init_block_type
    triton_interpreter._get_np_dtype = cache.get_np_dtype
    triton_interpreter._convert_float = cache.convert_float
    triton_interpreter.TensorHandle.__init__ = cache.init_handle
    tl.core._unwrap_if_constexpr = cache.unwrap_if_constexpr
    TritonSemantic.to_tensor = cache.to_tensor
    TritonSemantic.binary_op_type_checking_impl = cache.check_operands
    TritonSemantic.broadcast_impl_value = operators.broadcast_values
    TritonSemantic.cast = operators.cast
    ReduceOps.sum = bfloat16.sum_values
    for name, operation in _operations.items():
        setattr(InterpreterBuilder, name, operation)
    for name, scan in bfloat16.SCANS.items():
        setattr(ScanOps, name, scan)
    for name, function in INTERPRETED.items():
        setattr(libdevice, name, function)
    interpretation.install(_executor)


@contextlib.contextmanager
def executing(executor: Executor) -> Iterator[None]:
    """Within the block, interpret all kernels, and hand their launches to this executor.

    Raises:
        RuntimeError: this happens within another such block.
    """
    global _executor
    if _executor is not _process:
        raise RuntimeError("this process is simulating a host already")
    with contextlib.ExitStack() as kept:
        for owner, *names in _REPLACED:
            kept.enter_context(_kept(owner, *names))
        kept.callback(interpretation.install, interpretation.hooks)
        kept.callback(interpretation.set_enabled, interpretation.is_enabled(), here=interpretation.is_enabled_here())
        _executor = executor
        try:
            interpretation.enable()
            kept.callback(cache.patched_language().restore)
            yield
        finally:
            _executor = _process


def _checking(original: Callable[..., Any], pointers: int, mask: int | None, doing: str) -> Callable[..., Any]:
    """Return an operation of the interpreter's on memory that asks first whether the memory is there.

    `pointers` and `mask` are their places among its arguments.
    """

    def operate(self: InterpreterBuilder, *given: Any, **named: Any) -> Any:
        if (bounds := _executor.bounds) is None:
            return original(self, *given, **named)
        bounds.check(given[pointers], None if mask is None else given[mask], doing)
        result = original(self, *given, **named)
        is_strong = is_volatile_load(given, named) if doing == "reads" else doing != "writes"
        _executor.follow(given[pointers].data, result, is_strong=is_strong)
        return result

    return operate


_operations = {
    **bfloat16.OPERATIONS,
    **atomics.OPERATIONS,
    "create_masked_load": _checking(InterpreterBuilder.create_masked_load, 0, 1, "reads"),
    "create_masked_store": _checking(InterpreterBuilder.create_masked_store, 0, 2, "writes"),
    "create_atomic_rmw": _checking(atomics.create_atomic_rmw, 1, 3, "updates a word"),
    "create_atomic_cas": _checking(InterpreterBuilder.create_atomic_cas, 0, None, "updates a word"),
}

# What `patch_triton` replaces.
_REPLACED: list[tuple[Any, ...]] = [
    (JITFunction, "run", "__call__"),
    (InterpretedFunction, "__call__"),
    (GridExecutor, "__call__"),
    (tl.tensor, "__init__"),
    (tl.block_type, "__init__"),
    (triton_interpreter, "_get_np_dtype", "_convert_float"),
    (triton_interpreter.TensorHandle, "__init__"),
    (tl.core, "_unwrap_if_constexpr"),
    (TritonSemantic, "to_tensor", "binary_op_type_checking_impl", "broadcast_impl_value", "cast"),
    (ReduceOps, "sum"),
    (ScanOps, *bfloat16.SCANS),
    (InterpreterBuilder, *_operations),
    (libdevice, *INTERPRETED),
]


@contextlib.contextmanager
def _kept(owner: Any, *names: str) -> Iterator[None]:
    """Put an object's attributes back afterwards."""
    before = {name: vars(owner).get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _as_interpreted(kernel: JITFunction) -> InterpretedFunction:
    if kernel.fn not in _interpreted:
        _interpreted[kernel.fn] = InterpretedFunction(kernel.fn)
    return _interpreted[kernel.fn]


def _run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    return _as_interpreted(self).run(*args, grid=grid, warmup=warmup, **kwargs)


def _call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    return _as_interpreted(self)(*args, **kwargs)


def _call_interpreted(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `InterpretedFunction.__call__`, which patches the language again at every call of a device function.

    Here it is patched once a launch, for all modules: small jit functions cost little, as they do compiled.
    """
    return self.rewrite()(*args, **kwargs)


def _run_grid(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Stand in for `GridExecutor.__call__`."""
    _executor.run(self, args, {name: value for name, value in kwargs.items() if name in self.arg_names})
