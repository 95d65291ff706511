"""Four processes in a mesh of two replicas of two ranks, or in a row."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import free_port
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from iris_core import RankPool


@contextlib.contextmanager
def calls_on(kind_of_device: str) -> Iterator[Callable[..., Any]]:
    """Call functions on every process of a mesh."""
    with RankPool(4, kind_of_device) as pool:
        pool.call(join, free_port())
        yield pool.call


def join(rank: int, world_size: int, port: int) -> None:
    if device() == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device() == "cuda" else "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    mesh()
    row_of_ranks()


@functools.cache
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh(device(), (2, 2), mesh_dim_names=("dp", "tp"))


@functools.cache
def row_of_ranks() -> DeviceMesh:
    return init_device_mesh(device(), (4,), mesh_dim_names=("tp",))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
