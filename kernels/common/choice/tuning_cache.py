"""The user's tuning cache: measured times of this machine, in a file of the user's own that nothing else may write.

``$IRIS_CACHE_DIR``, or ``~/.cache/iris-overlap``, has a file for each kind of GPU and versions of Triton, torch and
this library. What is not as it should be is not used, and a warning says why and what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from .measured import Table, file_name, from_json, setup_of, to_json, versions

_MOST_BYTES = 16 << 20
_LOCK_TIMEOUT_S = 10.0  # for another writer, who takes milliseconds unless it was stopped
_MEND = "run `iris-bench tune` again, or delete the file"


def cache_path(gpu: str) -> Path:
    """Return the file of a kind of GPU, for what is installed here; it need not be there."""
    return cache_folder() / file_name(gpu, versions())


def cache_folder() -> Path:
    """Return where measurements of this machine are kept."""
    folder = os.environ.get("IRIS_CACHE_DIR")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "iris-overlap"


def read_cache(gpu: str) -> Table:
    """Return the user's measured times for a kind of GPU; none, with a warning, from a file that cannot be trusted."""
    try:
        path = cache_path(gpu)
    except RuntimeError:  # no home
        return {}
    try:
        return _times_in(path, gpu)
    except OSError as error:
        _warn(path, error)
        return {}


def _times_in(path: Path, gpu: str) -> Table:
    """Return what a file has; none, with a warning, if that cannot be trusted; OSError if it cannot be known."""
    try:
        return from_json(read_own(path), setup_of(gpu))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        _warn(path, error)
        return {}


def _warn(path: Path, error: Exception) -> None:
    warnings.warn(f"the tuning cache {path} is not used: {error}; {_MEND}", stacklevel=4)


def write_cache(gpu: str, table: Table) -> Path:
    """Add times to the user's file, in one step: a reader sees the old file or the new one, and what others add stays.

    Raises:
        ValueError: the folder is not the user's own, or cannot be written.
    """
    check_folder()
    path = cache_path(gpu)
    try:
        with _locked(path):
            write_own(path, to_json(setup_of(gpu), _times_in(path, gpu) | table))
    except OSError as error:
        raise ValueError(f"cannot write the tuning cache: {error}; IRIS_CACHE_DIR names another folder") from None
    return path


def check_folder() -> None:
    """Make the folder of the cache if it is not there.

    Raises:
        ValueError: it is not the user's own, or cannot be written; names it.
    """
    try:
        folder = cache_folder()
    except RuntimeError as error:
        raise ValueError(f"cannot keep a tuning cache: {error} IRIS_CACHE_DIR names a folder") from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder.stat(), folder)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot keep a tuning cache in {folder}: {error}; IRIS_CACHE_DIR names another folder"
        ) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let no other writer read a file between this one's reading and replacing it.

    Where that cannot be had, a warning says what may be lost, and this one goes on: a file system may have no locks,
    and who holds one may be stopped. The lock is a file that stays: were it removed, two writers could hold one each.
    """
    with contextlib.ExitStack() as opened:
        try:
            lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            opened.callback(os.close, lock)  # which unlocks it
            _lock(lock)
        except OSError as error:
            warnings.warn(
                f"cannot lock the tuning cache {path}: {error}; what others write at this moment may be lost",
                stacklevel=4,
            )
        yield


def _lock(file: int) -> None:
    """Lock an open file; TimeoutError if another process does not let go of it."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held the lock for {_LOCK_TIMEOUT_S:g} s") from None
        time.sleep(0.01)


def write_own(path: Path, text: str) -> None:
    """Write a file of the user's own in one step: a reader sees the old one or the new one; OSError if it cannot be."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuning-")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_own(path: Path) -> str:
    """Return the text of a regular file that this user owns, in a folder that others cannot write either.

    Raises:
        OSError, ValueError: it cannot be read, or is no such file.
    """
    # A link could lead anywhere, and a pipe would never end.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        _check_owner(status, path)
        _check_owner(path.parent.stat(), path.parent)
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, more than {_MOST_BYTES}")
        return file.read(_MOST_BYTES + 1).decode("utf-8")


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise ValueError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"others may write {path}: mode {stat.S_IMODE(status.st_mode):o}")
