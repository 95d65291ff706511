"""The files that a command is asked to write: looked at before anything is measured, which may take hours."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def check_outputs(*outputs: tuple[str, Path | None]) -> None:
    """Raise ValueError unless each file can be written, and no two of them are one; make the folders that are missing.

    Args:
        outputs: the option that names it, and the file; None is no file.
    """
    given = [(option, path) for option, path in outputs if path]
    check_different(*given)
    for option, path in given:
        try:
            _check_output(option, path)
        except OSError as error:
            raise ValueError(f"cannot write {option} {path}: {error}") from None


def check_new(*outputs: tuple[str, Path | None], overwrite: bool) -> None:
    """Raise ValueError if a file is there already, unless it may be replaced."""
    there = [f"{option} {path}" for option, path in outputs if path and path.exists()]
    if there and not overwrite:
        raise ValueError(f"{', '.join(there)} exists already; --overwrite replaces it")


def check_different(*files: tuple[str, Path]) -> None:
    """Raise ValueError if two options name one file, of which nothing would be left but what is written last."""
    options: dict[str, str] = {}
    for option, path in files:
        place = os.path.realpath(path)
        if place in options:
            raise ValueError(f"{options[place]} and {option} are both {path}; give two files")
        options[place] = option


def _check_output(option: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give a file")
    with contextlib.suppress(FileExistsError):  # as a file: said below
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder to write {path.name} to; give {option} in one that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {option} {path}: permission denied")
