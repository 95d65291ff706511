"""The end of a context, and arguments that make no sense to it."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import re
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, close_context, context, raised

from iris_core import iris
from iris_kernels.gemm_all_scatter import gemm_all_scatter

pytestmark = pytest.mark.parametrize("device", ["cpu"])


def close_twice(rank: int, world_size: int, users_group: bool) -> list[tuple[str, str]]:
    close_context()
    ctx = iris(1 << 20)
    output = gemm_all_scatter(ctx, torch.ones(4, 4), torch.ones(4, 4), variant="library")
    assert output.eq(4).all()
    tensor = ctx.zeros(4)
    if users_group:
        dist.destroy_process_group()  # as a user does who thinks that it is his
    ctx.close()
    ctx.close()
    operator = next(iter(ctx.operators.values()))
    uses = [
        (ctx.zeros, 4),
        (ctx.free, tensor),
        (ctx.barrier,),
        (ctx.check,),
        (ctx.reset,),
        (ctx.agree, "this", 1),
        (operator, torch.ones(4, 4), torch.ones(4, 4)),
        (ctx.release_operators,),
        (ctx.process_group,),
        (ctx.peer_view, tensor),
        (ctx.make_stream,),
        (ctx.get_heap_bases,),
    ]
    return [raised(*use) for use in uses]


@pytest.mark.parametrize("users_group", [False, True])
def test_a_closed_context_says_that_it_is(ranks: Callable[[int], Ranks], users_group: bool) -> None:
    pool = ranks(2)
    for errors in pool.call(close_twice, users_group):
        assert {kind for kind, _ in errors} == {"RuntimeError"}
        assert all("this context is closed" in message for _, message in errors), errors
    assert pool.call(open_and_close) == [4, 4]


def open_and_close(rank: int, world_size: int) -> int:
    ctx = iris(1 << 20)
    size = len(ctx.ones(4))
    ctx.close()
    return size


def copy_context(rank: int, world_size: int) -> bool:
    module = torch.nn.Linear(2, 2)
    module.ctx = context()  # type: ignore[assignment]
    return copy.deepcopy(module).ctx is module.ctx


def test_a_copy_of_a_module_has_the_same_context(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(copy_context) == [True] * 2


def ask_for_nonsense(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    errors = [raised(ctx.zeros, -1), raised(ctx.zeros, 4, dtype="float")]
    close_context()
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    errors += [raised(iris, 1 << bits, device="cpu") for bits in (60, 63, 70)]
    assert len(os.listdir("/proc/self/fd")) == before
    return errors


def test_sizes_and_dtypes_that_make_no_sense(ranks: Callable[[int], Ranks]) -> None:
    for shape, dtype, *heaps in ranks(2).call(ask_for_nonsense):
        assert shape == ("ValueError", "shape is (-1,); no length may be negative")
        assert dtype[0] == "ValueError"
        assert "'float'" in dtype[1]
        for bits, (_, message) in zip((60, 63, 70), heaps, strict=True):
            assert f"{1 << bits:,} bytes per rank, which iris(heap_size=...)" in message


def run_out_of_addresses(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Rank 1 cannot reserve the heap's addresses, then not map the memory of reports."""
    close_context()
    errors = []
    for which in range(2):
        mapped = [mmap.mmap] * which + [mock.Mock(side_effect=OSError("no room for it"))] * (rank == 1)
        calls = iter(mapped + [mmap.mmap] * 2)
        with mock.patch("mmap.mmap", lambda *args, calls=calls, **options: next(calls)(*args, **options)):
            errors.append(raised(iris, 1 << 20))
    return errors


def test_memory_that_one_rank_cannot_map_is_every_ranks_error(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(run_out_of_addresses)
    for peers, own in zip(first, second, strict=True):
        assert own[0] == "OSError"
        assert peers[0] == "PeerError"
        assert re.search("rank 1 failed to (reserve|map)", peers[1])
        assert "no room for it" in peers[1]
        assert "no room for it" in own[1]


class Optional(Exception):
    """Something that a program does without."""


def make_while_handling(rank: int, world_size: int) -> list[bool]:
    """A freed error's place in memory may be the next one's: the context must not take that for what it knows."""
    close_context()
    try:
        raise Optional
    except Optional as error:
        handled = weakref.ref(error)
        ctx = iris(1 << 20)
    gc.collect()
    is_known = handled() is not None
    ctx.close()
    gc.collect()
    return [is_known, handled() is not None]


def test_what_is_handled_is_known_as_long_as_the_context_is_open(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(make_while_handling) == [[True, False]] * 2


def broadcast_what_cannot_be(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    kinds = [torch.eye(3).to_sparse(), torch.empty(3, device="meta")]
    errors = [raised(ctx.broadcast, value if rank == 1 else None, 1) for value in kinds]
    assert ctx.broadcast(rank, 1) == 1  # usable at once
    return errors


def test_a_tensor_that_cannot_be_broadcast_is_refused_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).call(broadcast_what_cannot_be):
        for kind, message in errors:
            assert kind == "ValueError"
            assert "cannot be broadcast; a dense one can" in message
