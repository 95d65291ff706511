"""Processes that a rank forks: they have copies of all that it has, and are no rank."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from limits import short_limit
from ranks import Ranks, close_context, raised
from torch.utils.data import DataLoader, Dataset

from iris_core import Context, PeerError, iris
from iris_kernels.gemm_all_scatter import gemm_all_scatter

# What a child may know as well as its parent does.
KNOWN_TO_ALL = {
    *("get_rank", "get_num_ranks", "get_device", "get_device_id", "get_cu_count", "get_arch", "is_interpreted"),
    *("debug", "info", "warning", "error", "is_symmetric"),
    "close",  # does nothing
}


def in_child(fn: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked child, as JSON brings it."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, json.dumps(fn()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said)


def uses_of(ctx: Context, tensor: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    """Return a call of each method of a context, by name."""
    arguments = dict.fromkeys(("empty", "zeros", "ones", "arange", "rand", "randn", "uniform"), (4,)) | {
        "full": (4, 1.0),
        "zeros_like": (tensor,),
        "linspace": (0, 1, 4),
        "randint": (0, 9, 4),
        "free": (tensor,),
        "peer_view": (tensor,),
        "as_symmetric": (torch.ones(4),),
        "grow": (1 << 21,),
        "broadcast": (1, 0),
        "agree": ("this", 1),
    }
    methods = [name for name, _ in inspect.getmembers(type(ctx), callable) if not name.startswith("_")]
    uses = {name: (getattr(ctx, name), *arguments.get(name, ())) for name in methods if name not in KNOWN_TO_ALL}
    return uses | {"heap_bases": (getattr, ctx, "heap_bases")}


def entered(manager: Callable[[str], Any]) -> None:
    with manager("do this"):
        pass


def use_in_child(rank: int, world_size: int) -> tuple[list[int], dict[str, list[str]]]:
    close_context()
    ctx = iris(1 << 20)
    tensor = ctx.zeros(4)
    operand = torch.ones(4, 4)
    gemm_all_scatter(ctx, operand, operand, variant="fused_sequential:portable")
    operator = next(iter(ctx.operators.values()))
    ctx.barrier()

    def use_all() -> dict[str, tuple[str, str]]:
        uses = uses_of(ctx, tensor)
        for name in ("collective_section", "collective_allocation"):
            uses[name] = (entered, getattr(ctx, name))
        uses["raising_root_cause"] = (entered, lambda _: ctx.recovery.raising_root_cause())
        uses["operator"] = (operator, operand, operand)
        uses["operator.close"] = (operator.close,)
        uses["iris"] = (iris, 1 << 20)
        uses["group.all_gather"] = (ctx.control_plane.all_gather, 1)
        uses["group.barrier"] = (ctx.control_plane.barrier,)
        uses["group.exchange_fds"] = (ctx.control_plane.exchange_fds, None)
        uses["group.rejoin"] = (ctx.control_plane.rejoin,)
        uses["group.abort"] = (ctx.control_plane.abort, "for no reason")
        with short_limit(ctx):
            said = {name: raised(*use) for name, use in uses.items()}
        ctx.close()
        with pytest.raises(SystemExit), ctx:
            sys.exit()
        ctx.control_plane.close()
        return said

    said = in_child(use_all) if rank == 1 else {}
    # The ranks still talk to each other, and have the same memory.
    ctx.peer_view(tensor)[1 - rank] = rank
    ctx.barrier()
    assert tensor.eq(1 - rank).all()
    assert gemm_all_scatter(ctx, operand, operand, variant="fused_sequential:portable").eq(4).all()
    ctx.close()
    return [os.getpid()], said


@pytest.mark.parametrize("device", ["cpu"])
def test_a_child_is_refused_all_that_a_rank_may_ask(ranks: Callable[[int], Ranks]) -> None:
    _, ([pid], said) = ranks(2).call(use_in_child)
    assert len(said) > 30
    for name, (kind, message) in said.items():
        assert kind == "RuntimeError", (name, kind, message)
        assert f"process {pid} opened this context" in message, (name, message)


def leave_in_child(rank: int, world_size: int, how: str) -> int:
    """Rank 1's child leaves the function before its parent goes on."""
    close_context()
    with iris(1 << 20) as ctx:
        word = ctx.zeros(1, dtype=torch.int64)
        ctx.barrier()
        if rank == 1:
            child = os.fork()
            if child == 0:
                if how == "raises":
                    raise PeerError("what the child alone has met with")
                if how == "exits":
                    sys.exit(3)
                return 7
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == {"raises": 1, "exits": 3, "returns": 0}[how]
            ctx.peer_view(word)[0] = 5
        ctx.barrier()
        return int(word.item())


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("how", ["exits", "raises", "returns"])
def test_launch_hears_the_rank_alone(ranks: Callable[[int], Ranks], how: str) -> None:
    assert ranks(2).call(leave_in_child, how) == [5, 0]


def open_in_child(rank: int, world_size: int) -> tuple[int, list[str]]:
    close_context()
    return os.getpid(), in_child(lambda: raised(iris, 1 << 20))


@pytest.mark.parametrize("device", ["cpu"])
def test_a_child_opens_no_context_in_its_ranks_place(ranks: Callable[[int], Ranks]) -> None:
    for pid, (kind, message) in ranks(2).call(open_in_child):
        assert kind == "RuntimeError"
        assert f"process {pid} is a rank" in message


class Rows(Dataset[torch.Tensor]):
    """A data set on the heap."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def load_rows(rank: int, world_size: int, errors: str) -> list[list[float]]:
    close_context()
    stderr = os.dup(2)
    with open(errors, "a") as file:
        os.dup2(file.fileno(), 2)
    try:
        # A rank of torchrun may have children of multiprocessing's; one of `launch` is said to be a daemon.
        with iris(1 << 20) as ctx, mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
            rows = Rows(ctx.arange(6))
            batches = DataLoader(rows, batch_size=3, num_workers=1, multiprocessing_context="fork")
            loaded = [batch.tolist() for batch in batches]
            ctx.barrier()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    return loaded


@pytest.mark.parametrize("device", ["cpu"])
def test_workers_read_the_heap_and_end_in_silence(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    errors = tmp_path / "stderr"
    assert ranks(2).call(load_rows, str(errors)) == [[[0, 1, 2], [3, 4, 5]]] * 2
    assert errors.read_text() == ""
