"""Operators and contexts that were made and closed leave nothing on the host."""

from __future__ import annotations

import collections
import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import make_problem
from ranks import Ranks, close_context, context

from iris_core import iris
from overlap_taxonomy import get_variant

COUNT = 40
LEFT_BYTES = 64  # each


def left_behind(make_and_close: Callable[[], object]) -> tuple[dict[str, str], float]:
    """Return the types of which there are more objects for each that is made, and how many bytes each leaves.

    Of each such type it says what a late one is, and what refers to that. More in one round of two is no leak: what an
    abstract class has once been asked about a type, all its subclasses note.
    """

    def objects() -> list[Any]:
        gc.collect()
        return gc.get_objects()

    def bytes_used() -> int:
        gc.collect()
        sys._clear_type_cache()  # it keeps names of attributes, up to a limited number
        return tracemalloc.get_traced_memory()[0]

    def counted(found: list[Any]) -> collections.Counter[str]:
        return collections.Counter(type(one).__name__ for one in found)

    def describe(name: str, found: list[Any]) -> str:
        late = [one for one in found if type(one).__name__ == name][-2]
        referring = [repr(one)[:200] for one in gc.get_referrers(late) if one is not found]
        return f"such as {late!r}, to which refer {referring}"

    for _ in range(3):
        make_and_close()
    counts = [counted(objects())]
    for _ in range(COUNT):
        make_and_close()
    counts.append(counted(objects()))
    tracemalloc.start()
    try:
        for _ in range(COUNT):  # what this puts in the place of others counts as new: those were not traced
            make_and_close()
        used = bytes_used()
        for _ in range(COUNT):
            make_and_close()
        left = bytes_used() - used
    finally:
        tracemalloc.stop()
    after = objects()
    counts.append(counted(after))
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    more = {name: describe(name, after) for name in first if min(first[name], second[name]) >= COUNT}
    del after
    return more, left / COUNT


def make_operators(rank: int, world_size: int, family: str, variant: str) -> tuple[dict[str, str], float]:
    ctx, problem = context(), make_problem(family, 16, 16, 16, world_size, torch.float32)
    return left_behind(lambda: get_variant(family, variant).build(ctx, problem).close())


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("gemm_all_scatter", "library"),
        ("gemm_all_scatter", "workgroup_specialized:portable"),
        ("all_gather_gemm", "copy_engine:portable"),
        ("gemm_reduce_scatter", "producer_consumer:portable"),
        ("gemm_all_reduce", "fused_sequential:portable:stream_k"),
    ],
)
def test_a_closed_operator_leaves_nothing(ranks: Callable[[int], Ranks], family: str, variant: str) -> None:
    for more, left in ranks(1).call(make_operators, family, variant):
        assert not more
        assert left < LEFT_BYTES


def make_buffers(rank: int, world_size: int) -> tuple[dict[str, str], float]:
    ctx, engines = context(), torch.zeros(64).share_memory_()

    def make_and_free() -> None:
        ctx.free(ctx.as_symmetric(engines, copy=False))
        flags = ctx.zeros(4, dtype=torch.int64)
        ctx.watchdog.watch(flags, lambda word, rank: str(word))
        stream: Any = ctx.make_stream()
        stream.wait_for_current()
        ctx.free(flags)
        ctx.barrier()

    return left_behind(make_and_free)


@pytest.mark.parametrize("device", ["cpu"])
def test_a_freed_buffer_leaves_nothing(ranks: Callable[[int], Ranks]) -> None:
    for more, left in ranks(1).call(make_buffers):
        assert not more
        assert left < LEFT_BYTES


def make_contexts(rank: int, world_size: int) -> tuple[dict[str, str], float]:
    close_context()
    return left_behind(lambda: iris(1 << 20).close())


@pytest.mark.parametrize("device", ["cpu"])
def test_a_closed_context_leaves_nothing(ranks: Callable[[int], Ranks]) -> None:
    for more, left in ranks(1).call(make_contexts):
        assert not more
        assert left < LEFT_BYTES
