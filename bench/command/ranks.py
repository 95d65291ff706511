"""Where the ranks are: processes that this one starts, or this process and its siblings under torchrun or mpirun."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iris_core import RankPool
from iris_core.rendezvous.rank_info import rank_of_torchrun
from iris_core.utils.settings import ranks_per_gpu, timeout_s

_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
CPU_WORLD_SIZE = 4
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Launcher:
    """What started this process as one of several ranks."""

    name: str
    rank: int
    world_size: int


def find_launcher() -> Launcher | None:
    """Return what started this process as a rank, or None if it is to start its own.

    Raises:
        ValueError: torchrun did, and what it has set makes no sense; or mpirun, and mpi4py is not installed.
    """
    if (found := rank_of_torchrun()) is not None:
        return Launcher("torchrun", *found)
    if any(name in os.environ for name in _MPI_VARIABLES):
        try:
            from mpi4py import MPI
        except ImportError:
            raise ValueError(
                "started by mpirun, but mpi4py is not installed: pip install 'iris-overlap[mpi]'"
            ) from None
        return Launcher("mpirun", MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    return None


def choose_device(name: str, environment: Mapping[str, str], gpus: int, *, has_rocm: bool = False) -> str:
    """Return "cpu" or "cuda".

    Args:
        name: what was asked for; of "auto" IRIS_DEVICE decides, if it is set.
        environment: the variables.
        gpus: how many torch sees.
        has_rocm: whether the machine has ROCm, so that a torch that sees no GPU may be built for other machines.

    Raises:
        ValueError: an unknown name, or "cuda" without a GPU or with interpreted kernels, or "auto" where torch was not
            built for the machine's GPUs.
    """
    given = name
    if name == "auto":
        name = environment.get("IRIS_DEVICE", "auto")
    if name not in DEVICES:
        where = "" if name == given else " (from IRIS_DEVICE)"
        raise ValueError(f"unknown device {name!r}{where}; known devices: {', '.join(DEVICES)}")
    interpreted = environment.get("TRITON_INTERPRET", "0") not in ("", "0")
    if name == "auto":
        if has_rocm and not gpus and torch.version.hip is None:
            raise ValueError(
                "this machine has ROCm, and this torch is not built for it: bring torch 2.11 or later built for ROCm, "
                "with its Triton (https://pytorch.org/get-started/locally), and use its Python (make ... PY=python3); "
                "--device cpu interprets kernels instead, whose times are not performance"
            )
        return "cuda" if gpus and not interpreted else "cpu"
    if name == "cuda" and not gpus:
        raise ValueError("device 'cuda', but torch sees no GPU here; --device cpu runs without one")
    if name == "cuda" and interpreted:
        raise ValueError("device 'cuda' with TRITON_INTERPRET=1: interpreted kernels cannot reach a GPU; unset it")
    return name


def choose_world_size(
    given: int | None, *, device: str, gpus: int, launcher: Launcher | None, timed: bool = True
) -> int:
    """Return the number of ranks.

    Args:
        given: what was asked for, if anything was.
        device, gpus: "cpu" or "cuda", and how many GPUs there are.
        launcher: what started this process, if it is one of several.
        timed: whether something is measured: then ranks may not share GPUs.

    Raises:
        ValueError: what was given contradicts the launcher, or there are fewer GPUs.
    """
    if given is not None and given < 1:
        raise ValueError(f"world size {given} makes no sense; it takes a positive number of ranks")
    if launcher and given not in (None, launcher.world_size):
        raise ValueError(
            f"--world-size {given} contradicts {launcher.name}, which started {launcher.world_size} ranks; leave it out"
        )
    world_size = launcher.world_size if launcher else given or (gpus if device == "cuda" else CPU_WORLD_SIZE)
    most = ranks_per_gpu()
    if device == "cuda" and world_size > gpus * (1 if timed else most):
        shared = "; ranks that share GPUs (IRIS_RANKS_PER_GPU) cannot be timed" if most > 1 else ""
        raise ValueError(
            f"world size {world_size} is larger than the {gpus} GPU(s) present; "
            f"use --world-size {gpus} or less, or --device cpu{shared}"
        )
    return world_size


def check_hosts(hosts: int, world_size: int, launcher: Launcher | None) -> None:
    """Raise ValueError unless ranks can be started as those of so many hosts."""
    if hosts > 1 and launcher:
        raise ValueError(
            f"--hosts {hosts}: {launcher.name} started these ranks; IRIS_HOST_ID says on which simulated host each is"
        )
    if hosts < 1 or world_size % hosts:
        raise ValueError(f"--hosts {hosts} makes no sense; it takes a number that divides the {world_size} ranks")


def choose_setting(
    device: str, world_size: int | None, *, launcher: Launcher | None, timed: bool = True
) -> tuple[str, int]:
    """Return the device, "cpu" or "cuda", and the number of ranks, by what was asked for, the variables and the GPUs.

    Raises:
        ValueError: these do not go together, or a variable makes no sense of which every rank would fail, once started.
    """
    timeout_s()
    ranks_per_gpu()
    gpus = count_gpus()
    device = choose_device(device, os.environ, gpus, has_rocm=has_rocm())
    if device == "cpu":
        check_interpreter()
    return device, choose_world_size(world_size, device=device, gpus=gpus, launcher=launcher, timed=timed)


def has_rocm() -> bool:
    """Return whether the machine has ROCm, and nothing of NVIDIA's."""
    is_there = shutil.which("rocminfo") is not None or Path("/opt/rocm").is_dir()
    return is_there and shutil.which("nvidia-smi") is None


def check_interpreter() -> None:
    """Raise ValueError unless what interpreted kernels need is installed."""
    if importlib.util.find_spec("greenlet") is None:
        raise ValueError("without a GPU this needs greenlet, which is not installed: pip install 'iris-overlap[cpu]'")


def count_gpus() -> int:
    """Return the number of GPUs torch sees."""
    return torch.cuda.device_count()


class Ranks(ABC):
    """All ranks, as the sweep sees them. Every call is the same on all of them."""

    is_first: bool  # whether this process reports and writes

    @abstractmethod
    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run ``fn(rank, world_size, *args)`` on every rank; return rank 0's result (under a launcher, this rank's)."""

    @abstractmethod
    def close(self, *, kill: bool = False) -> None:
        """End the ranks that were started."""


class StartedRanks(Ranks):
    """Ranks that this process starts."""

    is_first = True

    def __init__(self, world_size: int, device: str, hosts: int = 1) -> None:
        self._pool = RankPool(world_size, device, hosts=hosts)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._pool.call(fn, *args)[0]

    def close(self, *, kill: bool = False) -> None:
        self._pool.close(kill=kill)


class LaunchedRanks(Ranks):
    """This process is a rank; a launcher started the others."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.is_first = launcher.rank == 0

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(self._launcher.rank, self._launcher.world_size, *args)

    def close(self, *, kill: bool = False) -> None:
        pass  # the launcher's business


@dataclass
class Run:
    """What ended the ranks early, if anything did."""

    error: Exception | None = None


@contextlib.contextmanager
def ending(ranks: Ranks) -> Iterator[Run]:
    """Within the block ranks are called; with it they end, and at once where it fails.

    What it failed of is kept, and the command goes on; an interrupt goes through.
    """
    run, is_done = Run(), False
    try:
        yield run
        is_done = True
    except Exception as error:
        run.error = error
    finally:
        ranks.close(kill=not is_done)


def start_ranks(launcher: Launcher | None, world_size: int, device: str, hosts: int = 1) -> Ranks:
    """Return the ranks that a launcher has started; without one, start them, on so many simulated hosts."""
    return LaunchedRanks(launcher) if launcher else StartedRanks(world_size, device, hosts)
