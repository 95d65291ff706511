"""A process that has imported torch, of which ranks on the CPU are forked: importing it takes longer than most tests.

A rank is a child of the process that starts it, as any is, with that one's environment, folder, signal mask and open
files; it runs what Python would be started with. So do the ranks of examples and commands, which start as users' do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any
from unittest import mock

_IMPORTED = ("torch._inductor.compile_fx", "torch.distributed.tensor", "pytest")
_IMPORTED += ("iris_core.checker", "iris_core.interpreter.patches", "iris_bench.cli", "iris_tensor_parallel")
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_MANY_FILES = 64
_ABOVE_FILES = 4096  # descriptors that no process passes on
_MESSAGE_BYTES = 1 << 20
_FLAG_OF_SPAWN = "--multiprocessing-fork"


class Template:
    """The process that ranks are forked of, started with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: Any = None

    def start(self, args: Sequence[str], files: Sequence[int]) -> int:
        """Do as ``python`` with these arguments does, in a child that has these files; return its process id."""
        place = args.index("-c")
        wanted = {
            "code": args[place + 1],
            "argv": ["-c", *args[place + 2 :]],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "files": (passed := sorted({0, 1, 2, *files})),
        }
        with self._lock, _adopting():
            if self._socket is None:
                self._begin()
            assert self._socket is not None
            socket.send_fds(self._socket, [pickle.dumps(wanted)], passed)
            return int(self._socket.recv(_MESSAGE_BYTES))

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(folder=os.path.dirname(__file__), socket=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},  # as ranks on the CPU have it
                stdin=subprocess.DEVNULL,
            )

    def fork(self) -> None:
        """Make this process's own fork the template: it is one itself, and has run nothing yet."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._socket.close()
            try:
                code = fork_ranks(theirs.detach())
            except SystemExit:
                os._exit(0)  # the program's ends are not this one's
            exec(code, vars(sys.modules["__main__"]))
            os._exit(0)
        theirs.close()

    def run(self, program: Path, arguments: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
        """Run a script in a fork, and fork its ranks of that; return its exit status and what it wrote.

        Raises:
            TimeoutError: it was ended after that long.
        """
        with tempfile.TemporaryFile("w+") as output:
            code = _PROGRAM.format(output=output.fileno(), program=str(program))
            process = self.start(["-c", code, *arguments], [output.fileno()])
            with open(os.pidfd_open(process)) as end:
                has_ended = bool(select.select([end], [], [], timeout_s)[0])
            if not has_ended:
                os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            output.seek(0)
            shown = output.read()
        if not has_ended:
            raise TimeoutError(f"{program.name} took longer than {timeout_s} s, and wrote\n{shown}")
        return os.waitstatus_to_exitcode(status), shown

    def close(self) -> None:
        """End the process; its ranks go on."""
        if self._socket is not None:
            self._socket.close()
            self._process.wait()


_CODE = "import sys; sys.path.insert(0, {folder!r}); import prefork; exec(prefork.fork_ranks({socket}), globals())"


_PROGRAM = "import prefork; prefork.run_program({program!r}, {output})"


def run_program(program: str, output: int) -> None:
    """Be the process of a script that writes to a file; its ranks are forked, too."""
    for standard in (1, 2):
        os.dup2(output, standard)
    own = Template()
    own.fork()
    sys.argv[0], sys.path[0] = program, os.path.dirname(program)
    with preforked(own):
        runpy.run_path(program, run_name="__main__")


def fork_ranks(number: int) -> str:
    """Fork a rank for each message, until there are no more. Return in ranks alone, with the code to run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which ends ranks, not this
    for module in _IMPORTED:
        importlib.import_module(module)
    _rewrite_kernels()
    gc.freeze()  # else each fork looks through all of this as it collects and ends, and so copies it
    ours = socket.socket(fileno=number)
    while True:
        message, files, _, _ = socket.recv_fds(ours, _MESSAGE_BYTES, _MANY_FILES)
        if not message:
            sys.exit()
        results, to = os.pipe()
        if (between := os.fork()) == 0:
            if rank := os.fork():
                os.write(to, str(rank).encode())
                os._exit(0)  # so that the rank is adopted
            for file in (ours.detach(), results, to):
                os.close(file)
            return _become(files, **pickle.loads(message))
        for file in (*files, to):
            os.close(file)
        os.waitpid(between, 0)
        ours.send(os.read(results, 64))
        os.close(results)


def _rewrite_kernels() -> None:
    """Make what is interpreted of every kernel there is, once: else each rank would, of those that it calls."""
    from triton.runtime.interpreter import InterpretedFunction

    for module in [*sys.modules.values()]:
        for one in [*vars(module).values()]:
            if isinstance(one, InterpretedFunction):
                one.rewrite()


def _become(
    received: list[int],
    *,
    code: str,
    argv: list[str],
    environment: dict[str, str],
    folder: str,
    blocked: list[int],
    files: list[int],
) -> str:
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE_FILES) for file in received]
    for file in received:
        os.close(file)
    for file, wanted in zip(above, files, strict=True):
        os.dup2(file, wanted)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = argv
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return code


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Let grandchildren whose parents end meanwhile be this process's children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def preforked(template: Template) -> Iterator[None]:
    """Fork what this process's pools start for the CPU."""
    spawn: Callable[..., int] = util.spawnv_passfds

    def start(path: bytes, args: Sequence[Any], files: Sequence[int]) -> int:
        if args[-1] != _FLAG_OF_SPAWN or os.environ.get("IRIS_DEVICE") != "cpu":
            return spawn(path, args, files)
        return template.start(args, files)

    with mock.patch.object(util, "spawnv_passfds", start):
        yield
