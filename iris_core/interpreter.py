"""Running Triton kernels on the CPU: Triton's own interpreter, with the programs of a grid taking turns.

Triton decides at decoration, from ``TRITON_INTERPRET``, whether a kernel is compiled or interpreted. A program that
makes its heap in host memory has usually decorated its kernels by then, so this switches them over where they are.

Triton's interpreter runs the programs of a grid one after the other. A persistent kernel whose programs wait for one
another, or for programs of other ranks, would never end; here a program that polls lets the others go on, as they do
on a GPU: it says so (`intrinsics.pause`), or is found to (polling.py).
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from traceback import FrameSummary
from typing import Any, Protocol

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder
from triton.runtime.jit import JITFunction

from . import interpreter_kept
from .reach import Reach
from .turns import Grid
from .user_lines import place_of, said_of, user_lines

# By the function a kernel was made of: a kernel's own hash reads the source of all it calls.
_interpreted: dict[Callable[..., Any], InterpretedFunction] = {}
_switched = False  # by `enable`, for good


def is_enabled() -> bool:
    """Return whether kernels of this process are interpreted."""
    return bool(triton.knobs.runtime.interpret)


def was_asked_for() -> bool:
    """Return whether ``TRITON_INTERPRET`` was set from outside; Triton sets it too, where `enable` has switched."""
    return is_enabled() and not _switched


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
    global _switched
    _switched = _switched or not is_enabled()
    triton.knobs.runtime.interpret = True
    # Integer arithmetic is not checked for overflow, as it is not on a GPU: the checks take half of the time.
    builder = triton_interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    JITFunction.run = _run
    JITFunction.__call__ = _call
    InterpretedFunction.__call__ = _call_interpreted
    GridExecutor.__call__ = _run_grid
    tl.tensor.__init__ = interpreter_kept.init_tensor
    tl.block_type.__init__ = interpreter_kept.init_block_type
    triton_interpreter._get_np_dtype = interpreter_kept.get_np_dtype
    triton_interpreter._convert_float = interpreter_kept.convert_float
    TritonSemantic.binary_op_type_checking_impl = interpreter_kept.check_operands
    for name, operation in _looked_up.items():
        setattr(InterpreterBuilder, name, operation)


class Machine(Protocol):
    """What runs kernels in place of this module: the race checker's simulated host.

    Attributes:
        reach: what its kernels may touch.
    """

    reach: Reach

    def launch(
        self, name: str, fn: Callable[..., None], arguments: dict[str, Any], shape: tuple[int, ...], given: Any
    ) -> None:
        """Queue a grid of programs, each ``fn(**arguments)``; `given` are the launch's own arguments."""

    def poll(self) -> None:
        """Let others go on: the running program polls."""


@contextlib.contextmanager
def simulated(machine: Machine) -> Iterator[None]:
    """Hand all launches of this process to a machine, whose programs, of several kernels, may then run in turns.

    Raises:
        RuntimeError: there is one already.
    """
    global _machine, _switched
    if _machine is not None:
        raise RuntimeError("this process is simulating a host already")
    with contextlib.ExitStack() as kept:
        for owner, *names in _REPLACED:
            kept.enter_context(_kept(owner, *names))
        was_enabled, was_switched = is_enabled(), _switched
        enable()
        scope = interpreter_kept.patched_language()
        _machine = machine
        try:
            yield
        finally:
            _machine = None
            scope.restore()
            triton.knobs.runtime.interpret = was_enabled
            _switched = was_switched


def _looking_up(name: str, pointers: int, mask: int | None, doing: str) -> Callable[..., Any]:
    """Return an operation of the interpreter's on memory that asks first whether the memory is there.

    `pointers` and `mask` are their places among its arguments.
    """
    original = getattr(InterpreterBuilder, name)

    def operate(self: InterpreterBuilder, *given: Any, **named: Any) -> Any:
        runner = _machine or _running
        if runner is not None:
            runner.reach.check(given[pointers], None if mask is None else given[mask], doing)
        result = original(self, *given, **named)
        if runner is not None and runner is _running:  # a machine follows its programs itself
            is_volatile = named.get("is_volatile", False) or any(given[_IS_VOLATILE:])
            is_strong = is_volatile if doing == "reads" else doing != "writes"
            runner.follow(given[pointers].data, result, is_strong=is_strong)
        return result

    return operate


_IS_VOLATILE = 5  # the place of that among a load's arguments, its last; a descriptor's load gives it by name
_looked_up = {
    "create_masked_load": _looking_up("create_masked_load", 0, 1, "reads"),
    "create_masked_store": _looking_up("create_masked_store", 0, 2, "writes"),
    "create_atomic_rmw": _looking_up("create_atomic_rmw", 1, 3, "updates a word"),
    "create_atomic_cas": _looking_up("create_atomic_cas", 0, None, "updates a word"),
}

# What `enable` replaces.
_REPLACED: list[tuple[Any, ...]] = [
    (JITFunction, "run", "__call__"),
    (InterpretedFunction, "__call__"),
    (GridExecutor, "__call__"),
    (tl.tensor, "__init__"),
    (tl.block_type, "__init__"),
    (triton_interpreter, "_get_np_dtype", "_convert_float"),
    (TritonSemantic, "binary_op_type_checking_impl"),
    (InterpreterBuilder, *_looked_up),
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


def let_others_run() -> None:
    """Give the turn to the grid's next program; when all of them poll, to other processes."""
    if _machine is not None:
        _machine.poll()
        return
    if _running is not None:
        _running.pause()


def check_on_heap(pointers: Any, from_rank: Any, to_rank: Any, heap_bases: Any, mask: Any) -> None:
    """Raise if what the running kernel wants to translate is not on `from_rank`'s heap; see `Reach.check_on_heap`."""
    runner = _machine or _running
    if runner is not None:
        ranks = _values(from_rank), _values(to_rank)
        lanes = mask if mask is None or isinstance(mask, str) else _values(mask)
        runner.reach.check_on_heap(pointers.handle, *ranks, heap_bases.handle, lanes)


def _values(value: Any) -> np.ndarray:
    """Return what a kernel has as a value, a block, a number or a constexpr."""
    return value.handle.data if isinstance(value, tl.tensor) else np.asarray(getattr(value, "value", value))


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


def clock_read() -> None:
    """Note that the running program reads the clock; see `Grid.clock_read`."""
    if _running is not None:
        _running.clock_read()


_running: Grid | None = None
_machine: Machine | None = None
_turn = threading.RLock()  # held by the thread whose grid runs: the language is patched for all threads


def _run_grid(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Stand in for `GridExecutor.__call__`: the same steps, but the programs take turns, and so do threads' grids."""
    kwargs = {name: value for name, value in kwargs.items() if name in self.arg_names}  # without num_warps and the like
    if _machine is not None:
        arguments, shape = _bound(self, args, kwargs)
        _machine.launch(self.fn.__name__, self.fn, arguments, shape, (args, kwargs))
        return
    with _turn:
        _run_on_host(self, args, kwargs)


def _run_on_host(self: GridExecutor, args: Any, kwargs: dict[str, Any]) -> None:
    global _running
    host_args, host_kwargs = self._init_args_hst(args, kwargs)
    for hook in self.pre_run_hooks:
        hook(*host_args, **host_kwargs)
    scope = interpreter_kept.patched_language()
    outer = _running
    try:
        arguments, shape = _bound(self, host_args, host_kwargs)
        triton_interpreter.interpreter_builder.set_grid_dim(*shape)
        reach = Reach.of_process()
        reach.add_arguments((host_args, host_kwargs), f"an argument of {self.fn.__name__}")
        _running = Grid(self.fn, arguments, shape, reach)
        _running.run()
    except Exception as error:
        lines = user_lines(error)
        if not lines:  # it is no mistake in the kernel
            raise InterpreterError(repr(error)) from error
        raise InterpreterError(_describe_mistake(error, lines, self.fn.__name__)) from None
    finally:
        _running = outer
        scope.restore()
    self._restore_args_dev(args, host_args, kwargs, host_kwargs)


def _describe_mistake(error: Exception, lines: list[FrameSummary], kernel: str) -> str:
    """Say what is wrong in a kernel, beginning with the line where."""
    called_from = "".join(f", called from {place_of(line)} ({line.name})" for line in lines[1:])
    program = f" program {_running.index} of" if _running is not None else ""
    return f"{place_of(lines[0])}: {said_of(error)}\n    {lines[0].line}\n  in{program} {kernel}{called_from}"


def _bound(executor: GridExecutor, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return what each program of a launch is called with, and the shape of the grid."""
    arguments = {
        name: value if name in executor.constexprs else triton_interpreter._implicit_cvt(value)
        for name, value in inspect.getcallargs(executor.fn, *args, **kwargs).items()
    }
    shape = executor.grid(arguments) if callable(executor.grid) else executor.grid
    return arguments, (*shape, 1, 1)[:3]
