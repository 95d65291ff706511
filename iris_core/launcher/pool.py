"""Starting the ranks of one host from one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ..device import interpretation
from ..errors import PeerError
from ..rendezvous.rank_info import HOST_VARIABLE, RankInfo
from ..rendezvous.unix_socket import random_address
from ..utils.settings import advice_to_share, asked_device, is_whole, ranks_per_gpu
from .pickling import pickle_call, unpickle_error
from .worker import run_worker

_GRACE_S = 3.0  # between asking a rank to end and killing it
_LOCALHOST = "127.0.0.1"
_DYING_S = 0.5  # between a process's closing its sockets and its end
_OF_A_BAD_ADDRESS = " (a kernel may have used a pointer that is not of the heap for one to a peer)"
_environment_lock = threading.Lock()


class RankError(Exception):
    """Where a rank's error came from: the cause of what `launch` raises, with the rank's own traceback."""


class _Death(Exception):
    """A rank's process has ended; a PeerError to the caller."""


class RankPool:
    """Ranks that stay up for several calls, each a process of its own.

    Args:
        world_size: number of ranks.
        device: "cpu", "cuda", or "auto": the GPUs if there are any.
        environment: further environment variables of the ranks.
        hosts: as how many hosts this machine acts, each with an equal number of consecutive ranks: these share no heap.

    Raises:
        ValueError: an unknown device, a world size below one, more ranks than GPUs, or hosts that do not divide them.
    """

    def __init__(
        self, world_size: int, device: str = "auto", *, environment: dict[str, str] | None = None, hosts: int = 1
    ) -> None:
        device = _checked_device(world_size, device)
        if not is_whole(hosts) or world_size % hosts:
            raise ValueError(f"hosts is {hosts!r}; it takes a number that divides the {world_size} ranks")
        self.world_size = world_size
        self.device = device
        self._one_call = threading.RLock()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._ends: list[int] = []  # descriptors that are ready when the rank's process has ended
        address = random_address()
        try:
            # It ends with the last rank, so that what a host's end leaves behind can be read.
            self._store = None if hosts == 1 else dist.TCPStore(_LOCALHOST, 0, is_master=True, wait_for_workers=False)
            for rank in range(world_size):
                given = RankInfo(rank, world_size, rank, address)
                of_host = _host_environment(given, self._store.port, rank * hosts // world_size) if self._store else {}
                with _environment(_rank_environment(device) | (environment or {}) | of_host):
                    self._start(given)
        except BaseException:  # a keyboard interrupt too: no rank is left running
            self.close(kill=True)
            raise

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` on every rank at once; return the ranks' results, by rank.

        `fn`, `args` and results must be picklable, `fn` by name from a module or a script's top level. Of calls by
        several threads one runs at a time.

        Raises:
            ValueError: `fn` or `args` cannot be pickled.
            PeerError: a rank's process died.
            Exception: what the first failing rank raised, with its traceback as the cause; all ranks are ended then.
        """
        with self._one_call:
            if not self._processes:
                raise RuntimeError("the ranks of this pool have ended")
            request = pickle_call(fn, args)
            try:
                self._send(request)
                return self._collect()
            except BaseException as error:  # a keyboard interrupt too: no rank is left running
                self.close(kill=True)
                if isinstance(error, _Death):
                    raise PeerError(str(error)) from None
                raise

    def close(self, *, kill: bool = False) -> None:
        """End the ranks: let them finish, also what another thread has called, or with `kill` do not."""
        if kill:  # such a call fails, and ends
            self._kill()
        with self._one_call:
            for pipe in self._pipes:
                pipe.close()  # a rank that waits for its next call ends at this
            if not kill:
                self._wait_for_ends()
            self._kill()
            for process in self._processes:
                process.join()
                process.close()
            for end in self._ends:
                os.close(end)
            self._processes, self._pipes, self._ends, self._store = [], [], [], None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(kill=kind is not None)

    def _start(self, rank_info: RankInfo) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        by_main = threading.current_thread() is threading.main_thread()
        process = spawn.Process(
            target=run_worker,
            args=(rank_info, theirs, os.getpid(), by_main, self._store is None),
            name=f"iris rank {rank_info.rank}",
        )
        process.daemon = True
        with _interrupts_held():
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
            self._ends.append(_end_of(process))
        theirs.close()

    def _wait_for_ends(self) -> None:
        deadline, running = time.monotonic() + _GRACE_S, set(self._ends)
        while running and (ended := wait(list(running), max(0.0, deadline - time.monotonic()))):
            running -= set(ended)

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ValueError):  # another thread has just ended it
                process.kill()

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        others = set(range(self.world_size))
        while others:
            for rank in self._ready(others):
                others.remove(rank)
                try:
                    results[rank] = self._result(rank)
                except Exception as error:
                    if _may_be_of_another(error):
                        self._raise_root_cause(rank, error, others)
                    raise
        return [results[rank] for rank in range(self.world_size)]

    def _send(self, request: bytes) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank has ended, which its result will say
                pipe.send_bytes(request)

    def _ready(self, ranks: Iterable[int], timeout_s: float | None = None) -> list[int]:
        """Return which of these ranks have answered or ended, once any has; none if the time is up before."""
        whose: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        whose |= {self._ends[rank]: rank for rank in ranks}
        return sorted({whose[ready] for ready in wait(list(whose), timeout_s)})

    def _result(self, rank: int) -> Any:
        """Return what a rank that is ready returned, or raise what it raised, or that it has died."""
        pipe = self._pipes[rank]
        try:
            if not pipe.poll():  # the rank has ended, and its end of the pipe is a child's of its own
                raise EOFError
            # Pickles, because only processes that this one started hold the pipes' other ends.
            succeeded, answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise _Death(f"rank {rank} {self._how_ended(rank)}") from None
        if succeeded:
            return answer
        error, text = unpickle_error(answer)
        raise error from RankError(f"rank {rank} of {self.world_size} raised:\n{text}")

    def _raise_root_cause(self, rank: int, error: Exception, others: set[int]) -> None:
        """Raise for the rank at fault, where the error of `rank` is about a peer that has died or raised, or soon does.

        A peer may find out before this process does.
        """
        deadline = time.monotonic() + _DYING_S
        while others and (ready := self._ready(others, max(0.0, deadline - time.monotonic()))):
            for other in ready:
                others.remove(other)
                try:
                    self._result(other)
                except _Death as death:
                    raise PeerError(f"{death}; rank {rank}: {error}") from error.__cause__
                except Exception as its_error:
                    if not _may_be_of_another(its_error):
                        raise

    def _how_ended(self, rank: int) -> str:
        wait([self._ends[rank]], _GRACE_S)
        code = self._processes[rank].exitcode
        if code is None or code >= 0:
            return f"ended with exit status {code}"
        hint = _OF_A_BAD_ADDRESS if -code in (signal.SIGSEGV, signal.SIGBUS) else ""
        try:
            return f"was killed by {signal.Signals(-code).name}{hint}"
        except ValueError:  # a real-time signal, which has no name
            return f"was killed by signal {-code}"


def launch(
    fn: Callable[..., Any], world_size: int, device: str = "auto", args: Sequence[Any] = (), *, hosts: int = 1
) -> list[Any]:
    """Start `world_size` ranks on this host, run ``fn(rank, world_size, *args)`` on each, and end them.

    A rank is a process; in it `iris_core.iris` finds the others. Without a GPU the ranks share host memory and run
    their kernels in Triton's interpretation. As with `torch.multiprocessing.spawn`, `fn` must be importable by name and
    a script's call must stand under ``if __name__ == "__main__":``. A rank cannot start processes of its own, such as
    a DataLoader's workers; ranks of ``torchrun`` can. Nor does it run what ``atexit`` was given, or write out files
    that are still open.

    Args:
        fn: what every rank does.
        world_size: number of ranks.
        device: "cpu", "cuda", or "auto": the GPUs if there are any.
        args: further arguments of `fn`; picklable.
        hosts: as how many hosts this machine acts, with an equal number of ranks each, to try what ranks of several
            hosts would do.

    Returns:
        The ranks' results, by rank.

    Raises:
        ValueError: an unknown device, a world size below one, more ranks than GPUs, hosts that do not divide the ranks,
            or what cannot be pickled.
        PeerError: a rank's process died; says which and how, also where a peer that missed it raised first.
        Exception: what the first failing rank raised, or the one whose fault that was; the other ranks are ended. What
            would end a process, as SystemExit, is a RuntimeError here.
    """
    with RankPool(world_size, device, hosts=hosts) as pool:
        return pool.call(fn, *args)


def _checked_device(world_size: int, device: str) -> str:
    device = asked_device(device)
    if not is_whole(world_size):
        raise ValueError(f"world_size is {world_size!r}; it takes a positive number of ranks")
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and world_size > gpus * ranks_per_gpu():
        if not gpus:
            raise ValueError("device='cuda', but torch sees no GPU here; device='cpu' runs without one")
        most, needed = gpus * ranks_per_gpu(), -(-world_size // gpus)
        raise ValueError(
            f"world size {world_size} is larger than the {gpus} GPU(s) present; start at most {most} ranks, "
            f"{advice_to_share(needed)}"
        )
    return device


def _rank_environment(device: str) -> dict[str, str]:
    environment = {"IRIS_DEVICE": device}
    if device == "cuda" and interpretation.is_enabled() and interpretation.is_enabled_here():
        environment["TRITON_INTERPRET"] = "0"  # set by Triton as this process had a context on the CPU
    if device == "cpu":
        # Ranks outnumber cores: one thread each. Gloo would look its own host up, which need not succeed.
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return environment


def _host_environment(rank_info: RankInfo, port: int, host: int) -> dict[str, str]:
    """Return what torchrun would set on one of several hosts, whose store a process other than the ranks holds."""
    return {
        HOST_VARIABLE: str(host),
        "RANK": str(rank_info.rank),
        "WORLD_SIZE": str(rank_info.world_size),
        "LOCAL_RANK": str(rank_info.local_rank),
        "MASTER_ADDR": _LOCALHOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _may_be_of_another(error: Exception) -> bool:
    """Whether what a rank raised may be another rank's fault."""
    return isinstance(error, (PeerError, TimeoutError)) or hasattr(error, "of_rank")


def _end_of(process: Any) -> int:
    """Return a descriptor that is ready once a process has ended, for the caller to close."""
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # older systems: here children that hold what it held count as it
        return os.dup(process.sentinel)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started meanwhile."""
    with _environment_lock:
        before = {name: os.environ[name] for name in changes if name in os.environ}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name in changes.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


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
