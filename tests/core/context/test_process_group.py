"""torch's process group of a context's ranks: whose it is, its limit, and its end."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from families import make_problem
from limits import short_limit
from ranks import Ranks, close_context, raised

from iris_core import Context, iris
from overlap_taxonomy import get_variant

on_cpu = pytest.mark.parametrize("device", ["cpu"])


def make_groups(rank: int, world_size: int, file: str, backend: str | None) -> tuple[list[bool], list[int]]:
    """Make contexts where torch has a group of the user's; return whether it served them, and how many were left."""
    close_context()
    dist.init_process_group(backend, store=dist.FileStore(file, world_size), rank=rank, world_size=world_size)
    pair = dist.new_group([0, 1], backend="gloo")
    served, left = [], []
    for serves in (True, False):
        other = mock.patch("iris_core.context.process_group._serves", return_value=False)
        with iris(1 << 20) as ctx, contextlib.nullcontext() if serves else other:
            group = ctx.process_group()
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == world_size
            served.append(group is dist.group.WORLD)
        left.append(len(dist.distributed_c10d._world.pg_map))
    assert dist.get_process_group_ranks(pair) == [0, 1]
    dist.destroy_process_group()
    return served, left


@on_cpu
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_group_of_the_users_serves_and_one_that_is_made_ends(
    ranks: Callable[[int], Ranks], tmp_path: Path, backend: str | None
) -> None:
    assert ranks(2).call(make_groups, str(tmp_path / "store"), backend) == [([True, False], [2, 2])] * 2


def make_a_group_alone(rank: int, world_size: int) -> tuple[str, str] | None:
    close_context()
    ctx = iris(1 << 20)
    error = None
    if rank == 1:
        with short_limit(ctx, 0.2):
            error = raised(ctx.process_group)
    ctx.reset()
    ctx.close()
    return error


@on_cpu
def test_a_group_that_a_rank_does_not_come_to_make_says_what_mends_that(ranks: Callable[[int], Ranks]) -> None:
    kind, message = ranks(2).call(make_a_group_alone)[1]
    assert kind == "PeerError"
    assert "reset()" in message


def call_the_library_alone(rank: int, world_size: int) -> tuple[str, str]:
    close_context()
    ctx = iris(1 << 20)
    with short_limit(ctx):
        ctx.process_group()
    problem = make_problem("gemm_all_reduce", 4, 4, 4, world_size, torch.float32)
    operator = get_variant("gemm_all_reduce", "library").build(ctx, problem)
    a, b = torch.ones(problem.a_shape(rank)), torch.ones(problem.b_shape(rank))
    error = raised(operator, a, b) if rank == 0 else ("", "")
    ctx.barrier()  # where rank 1 waits with the usual limit
    ctx.close()
    return error


@on_cpu
def test_a_collective_of_the_library_that_a_rank_does_not_call_ends(ranks: Callable[[int], Ranks]) -> None:
    (kind, message), _ = ranks(2).call(call_the_library_alone)
    assert kind == "RuntimeError"
    assert "Timed out waiting 1000ms" in message


def leave(ctx: Context, what: str) -> None:
    """Close a context: "close" as it is, "barrier" where the ranks differ, else as this error is on its way."""
    if what in ("close", "barrier"):
        if what == "barrier" and ctx.get_rank() == 0:
            ctx.heap.allocate((1,), torch.float32)
        ctx.close()
        return
    with ctx:
        raise KeyError(what)


def end_late(rank: int, world_size: int, what: str) -> tuple[tuple[str, str], list[str], bool]:
    """Leave a context whose group does not end within the limit; return what was raised and warned of."""
    close_context()
    may_end, ended, destroy = threading.Event(), threading.Event(), dist.destroy_process_group

    def late(group: dist.ProcessGroup) -> None:
        may_end.wait()
        destroy(group)
        ended.set()

    ctx = iris(1 << 20)
    with short_limit(ctx):
        ctx.process_group()
    with mock.patch("torch.distributed.destroy_process_group", late), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        error = raised(leave, ctx, what)
    may_end.set()
    ended.wait()
    return error, [str(one.message) for one in caught], ctx.recovery.is_closed


def fail_to_end(rank: int, world_size: int, what: str) -> tuple[tuple[str, str], bool]:
    """Leave a context whose group's end fails, where warnings are errors."""
    close_context()
    ctx = iris(1 << 20)
    ctx.process_group()
    ending = mock.patch("torch.distributed.destroy_process_group", side_effect=OSError("no end"))
    with ending, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        error = raised(leave, ctx, what)
    dist.destroy_process_group()
    return error, ctx.recovery.is_closed


def make_another_meanwhile(rank: int, world_size: int) -> tuple[tuple[str, str], bool]:
    """Ask for a group while that of a context before is still ending, and once more."""
    close_context()
    may_end, destroy = threading.Event(), dist.destroy_process_group

    def late(group: dist.ProcessGroup) -> None:
        may_end.wait()
        destroy(group)

    ctx = iris(1 << 20)
    with short_limit(ctx):
        ctx.process_group()
    with mock.patch("torch.distributed.destroy_process_group", late):
        raised(ctx.close)
    with iris(1 << 20) as another:
        error = raised(another.process_group)
        may_end.set()
        for thread in threading.enumerate():
            if thread.name == "end of a process group":
                thread.join()
        another.reset()
        total = torch.ones(1)
        dist.all_reduce(total, group=another.process_group())
    return error, total.item() == world_size


@on_cpu
def test_a_group_that_does_not_end_is_an_error_of_close(ranks: Callable[[int], Ranks]) -> None:
    pool = ranks(2)
    for (kind, message), warned, is_closed in pool.call(end_late, "close"):
        assert kind == "TimeoutError"
        assert "not ended within 1 s" in message
        assert "torch.compiler.reset()" in message
        assert not warned
        assert is_closed
    assert pool.call(fail_to_end, "close") == [(("OSError", "no end"), True)] * 2


@on_cpu
def test_a_group_that_does_not_end_hides_no_error(ranks: Callable[[int], Ranks]) -> None:
    pool = ranks(2)
    for (kind, message), warned, is_closed in [*pool.call(end_late, "user's"), *pool.call(end_late, "barrier")]:
        assert (kind, message) == ("KeyError", '"user\'s"') or "allocated differently" in message
        assert ["not ended within 1 s" in one for one in warned] == [True]
        assert is_closed
    assert pool.call(fail_to_end, "users") == [(("KeyError", "'users'"), True)] * 2


@on_cpu
def test_a_group_that_is_still_ending_serves_nobody(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), is_right in ranks(2).call(make_another_meanwhile):
        assert kind == "RuntimeError"
        assert "has not ended: CUDA graphs hold its collectives" in message
        assert is_right


def close_under_a_graph(rank: int, world_size: int) -> tuple[tuple[str, str], float]:
    """Close a context whose group's collectives a graph held, and then one of which a graph still holds them."""
    close_context()
    total = torch.ones(1, device=f"cuda:{rank}")
    for is_dropped in (True, False):
        ctx = iris(1 << 20, timeout_s=3)
        group, graph = ctx.process_group(), torch.cuda.CUDAGraph()
        dist.all_reduce(total, group=group)  # which connects the ranks
        with torch.cuda.graph(graph):
            dist.all_reduce(total, group=group)
        graph.replay()
        torch.cuda.synchronize()
        if is_dropped:
            graph.reset()
            ctx.close()
    return raised(ctx.close), total.item()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_a_rank")
@pytest.mark.parametrize("device", ["cuda"])
def test_nccl_waits_for_graphs_within_the_limit(ranks: Callable[[int], Ranks]) -> None:
    pool = ranks(2)
    for (kind, message), total in pool.call(close_under_a_graph):
        assert kind == "TimeoutError"
        assert "not ended within 6 s, and NCCL waits for the CUDA graphs" in message
        assert total == 2**4
    pool.end()  # their group does not end any more, not without the graph either
