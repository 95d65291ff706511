"""How commands end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

import typer

from iris_core import PeerError

from .ranks import Launcher

INTERRUPTED = 130  # as a shell has it of what SIGINT ended


def refuse(error: ValueError, *, speak: bool = True) -> NoReturn:
    """End a command that makes no sense; of several processes one should speak."""
    if speak:
        print(f"iris-bench: {error}", file=sys.stderr)
    raise typer.Exit(2)


def warn(message: str) -> None:
    """Say what does not end a command and should be known."""
    print(f"iris-bench: {message}", file=sys.stderr)


def complain(what: str, error: Exception) -> None:
    """Say that something ended early, and of what; where it is no rank that was lost, also where in the code."""
    print(f"iris-bench: {what} ended early: {type(error).__name__}: {error}", file=sys.stderr)
    if not isinstance(error, (TimeoutError, PeerError)) and error.__cause__:
        print(error.__cause__, file=sys.stderr)


def interrupted(left: str, *, launcher: Launcher | None, speak: bool) -> NoReturn:
    """End a command that was interrupted, and whose ranks have ended; says what is left of it."""
    if speak:
        print(f"iris-bench: interrupted: {left}", file=sys.stderr)
    if launcher:
        _end_at_once(INTERRUPTED)
    raise typer.Exit(INTERRUPTED)


def heed_termination() -> None:
    """Make SIGTERM end this process's command as Ctrl-C does: what it has is written, and its ranks end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the end, where Python swallows them: in what a garbage collection calls."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    interrupts = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in interrupts}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if came:
        signal.raise_signal(came[0])


def leave(*, failed: bool, lost: bool, launcher: Launcher | None) -> NoReturn:
    """End a command whose ranks are done, or lost.

    Under a launcher this process is one of them: where peers may be gone, it waits neither for a device nor for the
    threads of a process group.
    """
    if lost and launcher:
        _end_at_once(1)
    raise typer.Exit(1 if failed or lost else 0)


def _end_at_once(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
