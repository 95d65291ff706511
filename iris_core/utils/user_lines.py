"""Where an error comes from, in the user's lines: those that are not of this package, Triton, torch or numpy."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import numpy
import torch
import triton

_MACHINERY = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (Path(__file__).parents[1], *(Path(str(one.__file__)).parent for one in (numpy, torch, triton)))
)


def user_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the user's lines that led to an error, the innermost first; none if it came from elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    return [one for one in reversed(frames) if not os.path.realpath(one.filename).startswith(_MACHINERY)]


def place_of(line: traceback.FrameSummary) -> str:
    """Return a line as file:line."""
    return f"{shown(line.filename)}:{line.lineno}"


def shown(file: str) -> str:
    """Return a file's path, from the current folder on where it is below that."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def describe_error(error: BaseException) -> str:
    """Return an error's type and message."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()
