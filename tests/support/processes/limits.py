"""When ranks give up waiting, in tests: no test's outcome may depend on how fast the ranks are.

A wait that nothing can end may be given a short limit, by `short_limit`, on the rank that waits and for no longer.
Where several ranks would give up, or a wait could still end, `clock_of_waits` says by an event which one does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from iris_core import Context
from iris_core.backends import shm
from iris_core.device import intrinsics
from iris_core.device.sync import WATCHDOG_TIMEOUT_NS
from iris_core.rendezvous.unix_socket import LONGER

HUNG_S = 150.0  # more than whatever is done at once takes, on a busy machine
UNLIMITED = {
    "IRIS_TIMEOUT_S": "0"
}  # environment of ranks: one that waits for what never comes hangs, and the test fails


@contextlib.contextmanager
def short_limit(ctx: Context, timeout_s: float = 0.5) -> Iterator[None]:
    """Let this rank wait no longer than that, in kernels and on streams made meanwhile; on the host twice as long."""
    exchange: Any = ctx.control_plane.exchange
    sockets, longer = exchange._sockets.values(), LONGER if ctx.get_rank() else 1
    patches = [
        mock.patch.object(ctx, "timeout_s", timeout_s),
        mock.patch.object(ctx.watchdog, "_timeout_s", timeout_s),
        mock.patch.object(exchange, "timeout_s", 2 * timeout_s),
        *(mock.patch.object(one, "_timeout_s", 2 * timeout_s * longer) for one in sockets),
    ]
    word = ctx.watchdog.words[WATCHDOG_TIMEOUT_NS.value]
    usual = word.item()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.callback(word.fill_, usual)
        word.fill_(int(timeout_s * 1e9))
        yield


@contextlib.contextmanager
def clock_of_waits(is_up: Callable[[], bool]) -> Iterator[None]:
    """Let time stand still for this rank's interpreted kernels and streams, until `is_up`; then every limit passes.

    A wait looks at its flag after the clock, so what a peer has signalled before the event is seen in time. So that a
    mistake ends too, time is up after `HUNG_S` in any case.
    """
    end_s, now_s = time.monotonic() + HUNG_S, 0.0

    def monotonic() -> float:
        nonlocal now_s
        if is_up() or time.monotonic() > end_s:
            now_s += 1e4
        return now_s

    clock = SimpleNamespace(monotonic=monotonic, monotonic_ns=lambda: int(monotonic() * 1e9))
    with mock.patch.object(intrinsics, "time", clock), mock.patch.object(shm, "time", clock):
        yield


def never() -> bool:
    """Say that time is not up: a rank that does not give up before its peer, whatever happens."""
    return False


def has_happened(event: torch.Tensor) -> Callable[[], bool]:
    """Return whether a word, which a peer may write, is no longer 0; as a question to be asked again."""
    return lambda: event.item() != 0


def wait_until(has_come: Callable[[], bool]) -> None:
    """Return when it has; an error after `HUNG_S`."""
    end_s = time.monotonic() + HUNG_S
    while not has_come():
        assert time.monotonic() < end_s, "what was waited for did not happen"
        time.sleep(1e-3)
