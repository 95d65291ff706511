"""Starting the ranks of one host from one process."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from . import bootstrap, interpreter
from .errors import PeerError
from .host_group import random_address
from .messages import answer_of, error_as_answer, request_of

_PR_SET_PDEATHSIG = 1  # prctl(2)
_GRACE_S = 3.0  # between asking a rank to end and killing it
_DYING_S = 0.5  # between a process's closing its sockets and its end
_environment_lock = threading.Lock()


class RankError(Exception):
    """Where a rank's error came from: the cause of what `launch` raises, with the rank's own traceback."""


class RankPool:
    """Ranks that stay up for several calls, each a process of its own.

    Args:
        world_size: number of ranks.
        device: "cpu", "cuda", or "auto": the GPUs if there are any.
        environment: further environment variables of the ranks.

    Raises:
        ValueError: an unknown device, a world size below one, or more ranks than GPUs.
    """

    def __init__(self, world_size: int, device: str = "auto", *, environment: dict[str, str] | None = None) -> None:
        device = _checked_device(world_size, device)
        self.world_size = world_size
        self.device = device
        self._one_call = threading.Lock()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        address = random_address()
        try:
            with _environment(_rank_environment(device) | (environment or {})):
                for rank in range(world_size):
                    self._start(bootstrap.Origin(rank, world_size, rank, address, "iris_core.launch"))
        except BaseException:  # a keyboard interrupt too: no rank is left running
            self.close(kill=True)
            raise

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` on every rank at once; return the ranks' results, by rank.

        `fn`, `args` and results must be picklable, `fn` by name from a module or a script's top level. Of calls by
        several threads one runs at a time.

        Raises:
            ValueError: `fn` or `args` cannot be pickled.
            Whatever the first failing rank raised, with its traceback as the cause; all ranks are ended then.
            PeerError: a rank's process died.
        """
        with self._one_call:
            if not self._processes:
                raise RuntimeError("the ranks of this pool have ended")
            request = request_of(fn, args)
            try:
                self._send(request)
                return self._collect()
            except BaseException:  # a keyboard interrupt too: no rank is left running
                self.close(kill=True)
                raise

    def close(self, *, kill: bool = False) -> None:
        """End the ranks: let them finish, or with `kill` do not."""
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for its next call ends at this
        for process in self._processes:
            if not kill:
                process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(kill=kind is not None)

    def _start(self, origin: bootstrap.Origin) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        by_main = threading.current_thread() is threading.main_thread()
        process = spawn.Process(
            target=_serve, args=(origin, theirs, os.getpid(), by_main), name=f"iris rank {origin.rank}"
        )
        process.daemon = True
        with _interrupts_held():
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        theirs.close()

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while ranks:
            for pipe in wait(list(ranks)):
                assert isinstance(pipe, Connection)
                rank = ranks.pop(pipe)
                try:
                    # Pickles, because only processes that this one started hold the pipes' other ends.
                    succeeded, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise PeerError(f"rank {rank} {self._how_ended(rank)}") from None
                if not succeeded:
                    error, cause = self._failure(rank, answer)
                    if _may_be_of_another(error):
                        self._raise_what_is_behind(rank, error, cause, ranks)
                    raise error from cause
                results[rank] = answer
        return [results[rank] for rank in range(self.world_size)]

    def _send(self, request: bytes) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(request)
            except OSError:
                raise PeerError(f"rank {rank} {self._how_ended(rank)}") from None

    def _failure(self, rank: int, answer: tuple[BaseException, str]) -> tuple[BaseException, RankError]:
        return answer[0], RankError(f"rank {rank} of {self.world_size} raised:\n{answer[1]}")

    def _raise_what_is_behind(
        self, rank: int, error: BaseException, cause: RankError, others: dict[Connection, int]
    ) -> None:
        """Raise for the rank at fault, where what `rank` says is of a peer that has died, or raised, or soon does.

        A peer may hear of it before this process does.
        """
        processes = {process.sentinel: dead for dead, process in enumerate(self._processes)}
        deadline = time.monotonic() + _DYING_S
        while ready := wait([*processes, *others], timeout=max(0.0, deadline - time.monotonic())):
            for one in ready:
                if isinstance(one, Connection):
                    with contextlib.suppress(EOFError, ConnectionResetError):  # its process ends, too
                        succeeded, answer = pickle.loads(one.recv_bytes())
                        other, its_cause = (error, cause) if succeeded else self._failure(others[one], answer)
                        if not _may_be_of_another(other):
                            raise other from its_cause
                    del others[one]
                elif isinstance(one, int):
                    dead = processes[one]
                    raise PeerError(f"rank {dead} {self._how_ended(dead)}; rank {rank}: {error}") from cause

    def _how_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"


def launch(fn: Callable[..., Any], world_size: int, device: str = "auto", args: Sequence[Any] = ()) -> list[Any]:
    """Start `world_size` ranks on this host, run ``fn(rank, world_size, *args)`` on each, and end them.

    A rank is a process; in it `iris_core.iris` finds the others. Without a GPU the ranks share host memory and run
    their kernels in Triton's interpreter. As with `torch.multiprocessing.spawn`, `fn` must be importable by name and
    a script's call must stand under ``if __name__ == "__main__":``. A rank cannot start processes of its own, such as
    a DataLoader's workers; ranks of ``torchrun`` can. Nor does it run what ``atexit`` was given, or write out files
    that are still open.

    Args:
        fn: what every rank does.
        world_size: number of ranks.
        device: "cpu", "cuda", or "auto": the GPUs if there are any.
        args: further arguments of `fn`; picklable.

    Returns:
        The ranks' results, by rank.

    Raises:
        ValueError: an unknown device, a world size below one, more ranks than GPUs, or what cannot be pickled.
        PeerError: a rank's process died; says which and how, also where a peer that missed it raised first.
        Whatever the first failing rank raised, or the one whose fault that was; the other ranks are ended. What would
        end a process, as SystemExit, is a RuntimeError here.
    """
    with RankPool(world_size, device) as pool:
        return pool.call(fn, *args)


def _checked_device(world_size: int, device: str) -> str:
    device = bootstrap.asked_device(device)
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; it takes a positive number of ranks")
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and world_size > gpus * bootstrap.ranks_per_gpu():
        if not gpus:
            raise ValueError("device='cuda', but torch sees no GPU here; device='cpu' runs without one")
        most, needed = gpus * bootstrap.ranks_per_gpu(), -(-world_size // gpus)
        raise ValueError(
            f"world size {world_size} is larger than the {gpus} GPU(s) present; start at most {most} ranks, "
            f"{bootstrap.advice_to_share(needed)}"
        )
    return device


def _rank_environment(device: str) -> dict[str, str]:
    environment = {"IRIS_DEVICE": device}
    if device == "cuda" and interpreter.is_enabled() and not interpreter.was_asked_for():
        environment["TRITON_INTERPRET"] = "0"  # set by Triton as this process had a context on the CPU
    if device == "cpu":
        # Ranks outnumber cores: one thread each. Gloo would look its own host up, which need not succeed.
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return environment


def _may_be_of_another(error: BaseException) -> bool:
    """Whether what a rank raised may be another rank's fault."""
    return isinstance(error, (PeerError, TimeoutError)) or hasattr(error, "of_rank")


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started meanwhile."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the end, and from processes started meanwhile until they can do without.

    A rank imports torch for seconds before it can ignore what reaches the whole terminal.
    """
    resource_tracker.ensure_running()  # it would be started with the first process, and lets interrupts through then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(origin: bootstrap.Origin, pipe: Connection, parent: int, by_main: bool) -> None:
    """A rank's life: take calls until the pool closes the pipe. `by_main`: the parent's main thread started it."""
    if by_main:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
    else:  # the system's signal comes when the thread ends, of which the process need not end
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the pool ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back until here
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
            sys.stdout.flush()  # what a rank printed comes before what its caller prints next
            pipe.send_bytes(answer)
    # A context left open holds sockets and a mapping, both of which end with the process. Do not wait for the device
    # or for a process group's threads: a peer may be gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
