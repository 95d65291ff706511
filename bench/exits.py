"""How commands end."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from .ranks import Launcher


def refuse(error: ValueError, *, speak: bool = True) -> NoReturn:
    """End a command that makes no sense; of several processes one should speak."""
    if speak:
        print(f"iris-bench: {error}", file=sys.stderr)
    raise typer.Exit(2)


def leave(*, failed: bool, lost: bool, launcher: Launcher | None) -> NoReturn:
    """End a command whose ranks are done, or lost.

    Under a launcher this process is one of them: where peers may be gone, it waits neither for a device nor for the
    threads of a process group.
    """
    if lost and launcher:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    raise typer.Exit(1 if failed or lost else 0)
