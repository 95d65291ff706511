"""The files that a command is asked to write: looked at before anything is measured, which may take hours."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")

_PROBE_BYTES = 1 << 16  # more than any row


class UnwritableError(Exception):
    """A file could not be written, although it could before anything was measured; names it, and why."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within the block a file is written.

    Raises:
        UnwritableError: it could not be, as where the disk is full; part of it may be there.
    """
    try:
        yield
    except OSError as error:
        raise UnwritableError(f"cannot write {path}: {error.strerror or error}") from None


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


def rows_to_go_on_from(
    out: Path | None, plot: Path | None, read: Callable[[Path], list[Row]], *, resume: bool, overwrite: bool
) -> list[Row]:
    """Check --out and --plot and make their folders; return the rows of --out that a command is to go on from."""
    if resume and overwrite:
        raise ValueError("--resume keeps the rows of --out and --overwrite drops them; give one of them")
    if resume and not out:
        raise ValueError("--resume needs --out, the file to go on with")
    check_outputs(("--out", out), ("--plot", plot))
    if out is None or not out.exists() or (resume and out.stat().st_size == 0):
        return []
    if not resume and not overwrite:
        raise ValueError(f"--out {out} exists already; --resume goes on with it, --overwrite replaces it")
    return read(out) if resume else []


def left_over(out: Path | None, count: int, *, is_there: bool, overwrite: bool) -> str:
    """What an interrupted command leaves, in words.

    Args:
        out: the file of rows.
        count: the rows of this run.
        is_there: whether the file has rows, of this run or to go on from.
        overwrite: whether the command was to replace it.
    """
    if out is None:
        return f"{count} rows are lost; with --out they would be kept"
    if not is_there:
        return "nothing was written"
    instead = " in place of --overwrite" if overwrite else ""
    return f"{count} rows were written to {out}; the same command with --resume{instead} goes on"


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
    if path.exists():
        if not os.access(path, os.W_OK):
            raise ValueError(f"cannot write {option} {path}: permission denied")
    else:
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as probe:
            probe.write(bytes(_PROBE_BYTES))
