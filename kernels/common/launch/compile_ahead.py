"""The kernels of many operators compiled at once, on threads, ahead of the operators' first calls.

Triton compiles a kernel when it is first launched: one after the other, on one core, while the GPU waits. A rank of a
stress run has 255 of them on Hopper. With Triton 3.6 each takes half a second, and 81 launchers as much again:

| part | share | threads |
|---|---|---|
| Triton's representation of the Python source | 30 % | one at a time: it holds Python's lock |
| passes, LLVM | 46 % | at once |
| the assembler, and the C compiler: programs of their own | 24 % | at once |

So threads save a rank up to two thirds of the time. Ranks compile for themselves: most kernels are specialised for the
rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from iris_core import Context

from ..operators.operator import Operator

_LOOK_EVERY_S = 1.0
_MOST_THREADS = 16  # of a rank; more would wait for Python's lock


def compile_ahead(
    ctx: Context,
    calls: Iterable[tuple[Operator[Any], tuple[torch.Tensor, torch.Tensor], Mapping[str, torch.Tensor]]],
) -> Iterator[tuple[int, int]]:
    """Compile the kernels of calls that are not made yet; collective.

    What fails here is left to the call, which fails again and says of what.

    Args:
        ctx: the operators' context; its ranks share the host's cores.
        calls: operators, A and B, and the other operands by name; of an operator that runs no kernels of ours nothing
            is compiled.

    Yields:
        How many kernels are done, and of how many, over all ranks; about every second, until all are.
    """
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ctx.get_num_ranks()))
    asked = _Asked()
    with (
        _parsing_in_turn(),
        ThreadPoolExecutor(threads) as compilers,
        AsyncCompileMode(asked, ignore_errors=True) as mode,
    ):
        for operator, operands, others in calls:
            with contextlib.suppress(Exception):
                operator.compile_kernels(*operands, **others)
        pending, total = set(mode.raw_futures), len(mode.raw_futures)
        try:
            for kernel in asked.kernels:
                compilers.submit(kernel)
            while True:
                pending = wait(pending, _LOOK_EVERY_S).not_done
                found = ctx.control_plane.all_gather([total - len(pending), total], "compile kernels")
                done, of = (sum(counts) for counts in zip(*found, strict=True))
                if done == of:
                    break
                yield done, of
        finally:
            for future in pending:  # of a run that ends early the rest is not waited for
                future.cancel()
    yield done, of


@contextlib.contextmanager
def _parsing_in_turn() -> Iterator[None]:
    """Let one thread at a time parse a kernel's source.

    Python 3.11 keeps one depth for the trees of all threads, and raises SystemError where it so seems to be wrong.
    """
    parse, turn = JITFunction.parse, threading.Lock()

    def parse_in_turn(self: JITFunction) -> Any:
        with turn:
            return parse(self)

    JITFunction.parse = parse_in_turn
    try:
        yield
    finally:
        JITFunction.parse = parse


class _Asked(Executor):
    """Keeps what Triton would have compiled until all of it is known: to find it out takes Python's lock, too."""

    def __init__(self) -> None:
        self.kernels: list[Callable[[], None]] = []

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        self.kernels.append(functools.partial(_compile, compile_kernel, future))
        return future


def _compile(compile_kernel: Callable[[], Any], future: Future[Any]) -> None:
    """Compile a kernel and its launcher, which with Triton 3.6 is C; both are on disk from then on."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        kernel = compile_kernel()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        future.set_result(kernel)
    except Exception as error:
        future.set_exception(error)
