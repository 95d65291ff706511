"""Faults on a rank whose kernels are interpreted: device functions of the library replaced while kernels run.

A kernel finds the functions it calls in the globals of its module, when it runs. So a fault is put in every module that
has imported the function, on the rank that calls this, and taken out again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from iris_core import Context, iris
from iris_core.backends.shm import _ImmediateStream
from iris_core.checker.replacing import replaced
from iris_core.device.sync import signal
from iris_kernels.common.device.handshake import signal_chunk


@contextlib.contextmanager
def unsteady_signals(seed: int, *, latest_s: float, copies: int) -> Iterator[None]:
    """Send every signal late, by up to so long, and up to so many times."""
    draw = random.Random(seed)

    def send(flag_ptr: Any, value: Any, scope: str = "sys") -> None:
        if draw.random() < 0.3:
            time.sleep(draw.uniform(0, latest_s))
        for _ in range(draw.randint(1, copies)):
            signal(flag_ptr, value, scope)

    with replaced(signal, send):
        yield


@contextlib.contextmanager
def dropped(what: str, count: torch.Tensor) -> Iterator[None]:
    """Drop what this rank says to its one peer in a call: that it is "ready", or that its "data" has arrived.

    Ready is the first signal of a call. `count` counts what has been dropped.
    """
    signals = [0]

    def drop_signal(flag_ptr: Any, value: Any, scope: str = "sys") -> None:
        signals[0] += 1
        if scope == "gpu" or (signals[0] == 1) != (what == "ready"):
            signal(flag_ptr, value, scope)
        else:
            count.add_(1)

    def drop_part(*arguments: Any) -> None:
        if what == "ready":
            signal_chunk(*arguments)
        else:
            count.add_(1)

    def drop_flag(stream: Any, flag: torch.Tensor, value: int) -> None:
        if what == "ready":
            flag.fill_(value)
        else:
            count.add_(1)

    by_streams = mock.patch.object(_ImmediateStream, "write_value", drop_flag)
    with replaced(signal, drop_signal), replaced(signal_chunk, drop_part), by_streams:
        yield


@contextlib.contextmanager
def doomed_context(heap_size: int) -> Iterator[Context]:
    """Make a context, and leave it without a barrier, which would only raise again; collective."""
    ctx = iris(heap_size)
    try:
        yield ctx
    finally:
        ctx.close()
