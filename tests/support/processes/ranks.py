"""Ranks for tests: pools that several tests share, and in every rank one context that several calls share.

A test hands a pool a function of its own module; every rank imports that module by name and runs the function. What
is on pytest's path is on theirs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest
import torch

from iris_core import Context, RankPool, iris
from iris_core.utils.settings import ranks_per_gpu

# Of a wait: more than a peer takes to compile meanwhile on a busy machine, and less than a test may take.
TIMEOUT_S = os.environ.get("IRIS_TIMEOUT_S", "100")
_SHOWN_BYTES = 1 << 14
HEAP_SIZES = {"cpu": 16 << 20, "cuda": 3 << 30}  # bytes per rank

_context: Context | None = None


def context() -> Context:
    """Return this rank's context, made at the first call and kept for the later ones; collective."""
    global _context
    if _context is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _context = iris(HEAP_SIZES[device])
        assert _context.get_device().type == device
    return _context


def close_context() -> None:
    """Close this rank's context, if it has one; collective."""
    global _context
    if _context is not None:
        _context.close()
        _context = None


class Ranks:
    """The ranks of one pool, for a test to call; other tests have used them and will again."""

    def __init__(self, pools: Pools, world_size: int, device: str, hosts: int = 1) -> None:
        self.world_size = world_size
        self.device = device
        self.hosts = hosts
        self._pools = pools

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(rank, world_size, *args)`` on every rank; return the ranks' results. An error ends the ranks."""
        return self._pools.call(self, fn, *args)

    def end(self) -> None:
        """End the ranks; the next call starts fresh ones. For a test that leaves them unfit for others."""
        self._pools.end(self)


class Pools:
    """Pools of ranks by world size, device and simulated hosts, started at the first use and again after an error.

    What ranks write to standard error is shown where a test fails in a call, be it of the test that started them.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str, int], tuple[RankPool, IO[bytes]]] = {}  # and what its ranks have written

    def ranks(self, world_size: int, device: str, hosts: int = 1) -> Ranks:
        """Return the ranks of a pool; the processes start with their first call."""
        return Ranks(self, world_size, device, hosts)

    def call(self, ranks: Ranks, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on every rank of a pool."""
        key = (ranks.world_size, ranks.device, ranks.hosts)
        if key not in self._pools:
            how: dict[str, Any] = {"environment": {"IRIS_TIMEOUT_S": TIMEOUT_S}, "hosts": ranks.hosts}
            with _standard_error_to(tempfile.TemporaryFile()) as file:
                self._pools[key] = RankPool(ranks.world_size, ranks.device, **how), file
        pool, written = self._pools[key]
        try:
            return pool.call(fn, *args)
        except BaseException:  # the pool has ended its ranks
            del self._pools[key]
            written.seek(0)
            print("...", written.read()[-_SHOWN_BYTES:].decode(errors="replace"), sep="", file=sys.stderr)
            raise

    def end(self, ranks: Ranks) -> None:
        """End the ranks of a pool, where an error has not."""
        if found := self._pools.pop((ranks.world_size, ranks.device, ranks.hosts), None):
            found[0].close(kill=True)

    def close(self) -> None:
        """End all ranks."""
        for pool, _ in self._pools.values():
            pool.close()
        self._pools.clear()


@contextlib.contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Have processes that are started meanwhile write to a file."""
    own = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield file
    finally:
        os.dup2(own, 2)
        os.close(own)


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Call a function that must raise; return the error's type and message, for the test to look at."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"{getattr(fn, '__name__', fn)} did not raise")


def skip_where_ranks_share_a_gpu() -> None:
    """Skip what needs torch's process groups where ranks take turns on a GPU."""
    if ranks_per_gpu() > 1:
        pytest.skip("NCCL and RCCL take one rank a GPU, and IRIS_RANKS_PER_GPU allows more")


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
