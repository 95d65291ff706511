"""What the examples' command lines share: the number of ranks and the device; under torchrun, one rank a process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import iris_core


def command_line(description: str | None, *, ranks: int = 2) -> argparse.ArgumentParser:
    """Return the parser of an example that starts so many ranks by default; its docstring begins with what it does."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser


def run(body: Callable[..., Any], arguments: argparse.Namespace, *others: Any) -> None:
    """Call ``body(rank, world_size, *others)`` on every rank, and print what the ranks return."""
    if "RANK" in os.environ:  # under torchrun
        returned = [body(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *others)]
    else:
        returned = iris_core.launch(body, arguments.ranks, device=arguments.device, args=others)
    for one in returned:
        if one is not None:
            print(one)
