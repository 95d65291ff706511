"""A rank's life, in a process that `launch` has started."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection

from . import bootstrap
from .messages import answer_of, error_as_answer

_PR_SET_PDEATHSIG = 1  # prctl(2)


def serve(origin: bootstrap.Origin, pipe: Connection, parent: int, by_main: bool) -> None:
    """A rank's life: take calls until the pool closes the pipe. `by_main`: the parent's main thread started it."""
    if by_main:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
    else:  # the system's signal comes when the thread ends, of which the process need not end
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the pool ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back until here
    os.set_inheritable(pipe.fileno(), False)  # a program that this one starts does not hold it
    bootstrap.set_launched(origin)
    with contextlib.suppress(EOFError, OSError):  # the pool is gone
        while True:
            request = pipe.recv_bytes()
            try:
                fn, args = pickle.loads(request)
                answer = answer_of(fn(origin.rank, origin.world_size, *args))
            except Exception as error:
                answer = error_as_answer(error)
            except BaseException as error:  # sys.exit() and the like, at which not the caller is to end
                answer = error_as_answer(RuntimeError(f"rank {origin.rank} raised {error!r} in the middle of a call"))
            _flush()  # what a rank printed comes before what its caller prints next
            pipe.send_bytes(answer)
    # A context left open holds sockets and a mapping, both of which end with the process. Do not wait for the device
    # or for a process group's threads: a peer may be gone.
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, its disk is full, it is closed
            stream.flush()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
