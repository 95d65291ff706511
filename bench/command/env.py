"""The command ``iris-bench env``: what a report of a bug needs to say of the machine and of what is installed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated, Any

import torch
import typer

from iris_kernels.common.choice.measured import shipped_table
from iris_kernels.common.choice.tuning_cache import cache_path, read_cache

from ..measure import environment
from ..records import report
from .ranks import choose_setting

_PACKAGES = ("iris-overlap", "torch", "triton", "numpy", "cuda-bindings", "greenlet", "mpi4py", "transformers")
_VARIABLES = ("IRIS_", "TRITON_", "CUDA_", "HIP_", "ROCR_", "NCCL_", "RCCL_", "TORCH_", "TORCHINDUCTOR_", "OMP_NUM_")


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the machine, its GPUs, what is installed, and what is set: what a report of a bug needs."""
    found = {name: dict(lines) for name, lines in _sections()}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = report.make_console()
    for name, lines in found.items():
        console.print(f"{name}:", markup=False)
        width = max(map(len, lines), default=0)
        for key, value in lines.items():
            console.print(f"  {key:<{width}}  {value}", markup=False, soft_wrap=True)


def _sections() -> Iterator[tuple[str, Iterator[tuple[str, Any]]]]:
    yield "machine", _machine()
    yield "installed", _installed()
    yield "GPUs", _gpus()
    yield "chosen", _chosen()
    names = [name for name in sorted(os.environ) if name.startswith(_VARIABLES)]
    yield "environment", iter([(name, os.environ[name]) for name in names] or [("none", "of ours, Triton's, torch's")])


def _machine() -> Iterator[tuple[str, Any]]:
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "cores", len(os.sched_getaffinity(0))
    yield "driver", environment.driver() or "none"
    if torch.version.cuda:
        yield "torch built for CUDA", torch.version.cuda
    if torch.version.hip:
        yield "torch built for ROCm", torch.version.hip


def _installed() -> Iterator[tuple[str, Any]]:
    yield "python", platform.python_version()
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"
    yield "commit", environment.commit()


def _gpus() -> Iterator[tuple[str, Any]]:
    count = torch.cuda.device_count()
    for index in range(count):
        one = torch.cuda.get_device_properties(index)
        unreached = [peer for peer in range(count) if peer != index and not _reaches(index, peer)]
        yield (
            str(index),
            f"{one.name}, {one.total_memory / 2**30:.0f} GiB, {one.multi_processor_count} SMs, "
            f"compute capability {one.major}.{one.minor}, "
            + (f"does not reach GPU {', '.join(map(str, unreached))}" if unreached else "reaches all others"),
        )
    if not count:
        yield "none", "kernels are interpreted, on the CPU"


def _reaches(index: int, peer: int) -> bool:
    return torch.cuda.can_device_access_peer(index, peer)


def _chosen() -> Iterator[tuple[str, Any]]:
    try:
        device, world_size = choose_setting("auto", None, launcher=None)
        yield "device and ranks of commands", f"{device}, {world_size}"
    except ValueError as error:
        yield "device and ranks of commands", f"none: {error}"
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    yield "times that come with the library", f"{len(shipped_table(gpu))} problems for {gpu or 'no GPU'}"
    yield "tuning cache", f"{len(read_cache(gpu))} problems in {cache_path(gpu)}"
