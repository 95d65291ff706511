"""Where an error comes from, in the user's lines: those not of our packages, Triton, torch, numpy or Python."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGES = ("iris_core", "iris_kernels", "iris_tensor_parallel", "numpy", "torch", "triton")
_PYTHON, *_SITES = (os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "purelib", "platlib"))


def is_pythons(file: str) -> bool:
    """Return whether a file is of Python itself, and not of what is installed beside it."""
    path = os.path.realpath(file)
    return file.startswith("<frozen") or (path.startswith(_PYTHON) and not path.startswith(tuple(_SITES)))


def user_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the user's lines that led to an error, the innermost first; none if it came from elsewhere."""
    loaded = [str(sys.modules[name].__file__) for name in _PACKAGES if name in sys.modules]
    machinery = tuple(os.path.realpath(os.path.dirname(file)) + os.sep for file in loaded)
    return [
        line
        for line in reversed(traceback.extract_tb(error.__traceback__))
        if not is_pythons(line.filename) and not os.path.realpath(line.filename).startswith(machinery)
    ]


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
