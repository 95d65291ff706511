"""A rank's life, in a process that `launch` has started."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.synchronize import SemLock
from typing import NoReturn

from ..rendezvous.rank_info import RankInfo, set_launched
from ..utils.owner import Owner
from .pickling import pickle_error, pickle_result

_PR_SET_PDEATHSIG = 1  # prctl(2)


def run_worker(rank_info: RankInfo, pipe: Connection, parent: int, by_main: bool, on_one_host: bool) -> None:
    """A rank's life: take calls until the pool closes the pipe.

    Args:
        rank_info: who it is; of ranks on several hosts the environment says the rest, as torchrun's does.
        pipe: to the pool.
        parent: the pool's process.
        by_main: whether the parent's main thread started it.
        on_one_host: whether all ranks are on this host.
    """
    if by_main:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
    else:  # the system's signal comes when the thread ends, of which the process need not end
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the pool ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back until here
    os.set_inheritable(pipe.fileno(), False)  # a program that this one starts does not hold it
    if on_one_host:
        set_launched(rank_info)
    with contextlib.suppress(EOFError, OSError):  # the pool is gone
        while True:
            answer = _answer(rank_info, pipe.recv_bytes())
            _flush()  # what a rank printed comes before what its caller prints next
            pipe.send_bytes(answer)
    # A context left open holds sockets and a mapping, both of which end with the process. Do not wait for the device
    # or for a process group's threads: a peer may be gone.
    _remove_semaphores()
    _flush()
    os._exit(0)


def _answer(rank_info: RankInfo, request: bytes) -> bytes:
    """Make a call and return what came of it; in a process that the call has forked, end that."""
    owner = Owner()
    try:
        fn, args = pickle.loads(request)
        result = fn(rank_info.rank, rank_info.world_size, *args)
        if not owner.is_this_process:
            sys.exit()
        return pickle_result(result)
    except BaseException as error:
        if not owner.is_this_process:
            _end_as_child(error)
        if isinstance(error, Exception):
            return pickle_error(error)
        # sys.exit() and the like, at which not the caller is to end
        return pickle_error(RuntimeError(f"rank {rank_info.rank} raised {error!r} in the middle of a call"))


def _end_as_child(error: BaseException) -> NoReturn:
    """End a process that a rank has forked, with the exit status that Python gives, and as little else as the rank."""
    status = error.code if isinstance(error, SystemExit) else 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    _flush()
    os._exit(status or 0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, its disk is full, it is closed
            stream.flush()


def _remove_semaphores() -> None:
    """Remove the names of multiprocessing's semaphores that this process made, as an interpreter does that exits.

    The lock of tqdm, which inductor's progress bar makes, is one. The resource tracker, which the pool's process and
    all ranks share, would warn of those that are left. Nothing else that multiprocessing does at an exit is done: a
    pool's shutdown waits for its workers.
    """
    for finalizer in list(multiprocessing.util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):  # as a name that was removed before
                finalizer()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
