"""What runs the grids of interpreted kernels: this process, one grid after the other, its programs taking turns."""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from traceback import FrameSummary
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor

from ..device.interpretation import Hooks
from ..utils.user_lines import describe_error, place_of, user_lines
from .cache import patched_language
from .grid import Grid
from .memory_bounds import MemoryBounds, check_hint


class Executor(Hooks, ABC):
    """Runs the grids of interpreted kernels, and is asked about what their programs do."""

    @property
    @abstractmethod
    def bounds(self) -> MemoryBounds | None:
        """What the running program may access; None while no program runs."""

    @abstractmethod
    def run(self, grid: GridExecutor, args: Any, kwargs: dict[str, Any]) -> None:
        """Run a kernel's launch, given its arguments without ``num_warps`` and the like."""

    def follow(self, addresses: np.ndarray, found: Any, *, is_strong: bool) -> None:
        """Note that the running program has accessed memory; see `Grid.follow`."""

    def check_on_heap(self, pointers: Any, from_rank: Any, to_rank: Any, heap_bases: Any, mask: Any) -> None:
        if (bounds := self.bounds) is not None:
            lanes = mask if mask is None or isinstance(mask, str) else _values(mask)
            bounds.check_on_heap(pointers.handle, _values(from_rank), _values(to_rank), heap_bases.handle, lanes)

    def check_hint(self, pointers: Any, hint: list[int]) -> None:
        check_hint(pointers.handle, hint)


class ProcessExecutor(Executor):
    """Runs a grid at once, in the thread that launches it; threads take turns, as the language is patched for all."""

    def __init__(self) -> None:
        self._running: Grid | None = None
        self._turn = threading.RLock()

    @property
    def bounds(self) -> MemoryBounds | None:
        return self._running.bounds if self._running is not None else None

    def pause(self) -> None:
        if self._running is not None:
            self._running.pause()

    def clock_read(self) -> None:
        if self._running is not None:
            self._running.clock_read()

    def follow(self, addresses: np.ndarray, found: Any, *, is_strong: bool) -> None:
        if self._running is not None:
            self._running.follow(addresses, found, is_strong=is_strong)

    def run(self, grid: GridExecutor, args: Any, kwargs: dict[str, Any]) -> None:
        """Stand in for `GridExecutor.__call__`: the same steps, but the programs take turns."""
        with self._turn:
            host_args, host_kwargs = grid._init_args_hst(args, kwargs)
            for hook in grid.pre_run_hooks:
                hook(*host_args, **host_kwargs)
            self._run_programs(grid, host_args, host_kwargs)
            grid._restore_args_dev(args, host_args, kwargs, host_kwargs)

    def _run_programs(self, grid: GridExecutor, args: Any, kwargs: dict[str, Any]) -> None:
        scope = patched_language()
        outer = self._running
        try:
            arguments, shape = bound_arguments(grid, args, kwargs)
            triton_interpreter.interpreter_builder.set_grid_dim(*shape)
            bounds = MemoryBounds.of_process()
            bounds.add_arguments((args, kwargs), f"an argument of {grid.fn.__name__}")
            self._running = Grid(grid.fn, arguments, shape, bounds)
            self._running.run()
        except Exception as error:
            lines = user_lines(error)
            if not lines:  # it is no mistake in the kernel
                raise InterpreterError(repr(error)) from error
            raise InterpreterError(self._describe_mistake(error, lines, grid.fn.__name__)) from None
        finally:
            self._running = outer
            scope.restore()

    def _describe_mistake(self, error: Exception, lines: list[FrameSummary], kernel: str) -> str:
        """Say what is wrong in a kernel, beginning with the line where."""
        called_from = "".join(f", called from {place_of(line)} ({line.name})" for line in lines[1:])
        program = f" program {self._running.index} of" if self._running is not None else ""
        where, what = place_of(lines[0]), describe_error(error)
        return f"{where}: {what}\n    {lines[0].line}\n  in{program} {kernel}{called_from}"


def bound_arguments(grid: GridExecutor, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return what each program of a launch is called with, and the shape of the grid."""
    arguments = {
        name: value if name in grid.constexprs else triton_interpreter._implicit_cvt(value)
        for name, value in inspect.getcallargs(grid.fn, *args, **kwargs).items()
    }
    shape = grid.grid(arguments) if callable(grid.grid) else grid.grid
    return arguments, (*shape, 1, 1)[:3]


def _values(value: Any) -> np.ndarray:
    """Return what a kernel has as a value, a block, a number or a constexpr."""
    return value.handle.data if isinstance(value, tl.tensor) else np.asarray(getattr(value, "value", value))
