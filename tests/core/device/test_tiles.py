"""The tile methods of a context object: against their definitions, under the race checker, and waiting in vain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from limits import short_limit
from ranks import Ranks, context, raised
from tile_collectives import Collective, Run, own_tiles, total

import iris_core
from iris_core.checker import check
from iris_core.device import tiles

PART = (13, 21)  # which no tile divides
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int8]
NO_ATOMICS = {torch.int8}


@triton.jit
def computed(tile, src):
    """Return the tile with its values, as if they were computed."""
    pointers, mask = src.tile_ptr(tile)
    return iris_core.Tile(tile.pid_m, tile.pid_n, tile.block_m, tile.block_n, tl.load(pointers, mask=mask, other=0))


@triton.jit
def published(tile, src, ctx, words_ptr):
    """The same, stored for the peers to load once this tile's word is set."""
    made = computed(tile, src)
    pointers, mask = src.tile_ptr(tile)
    tl.store(pointers, made.data, mask=mask)
    tl.debug_barrier()
    ctx.atomic_xchg(words_ptr + src.tile_id(tile), 1, ctx.rank, sem="release", scope="sys")
    return made


@triton.jit
def call_all_gather(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, DIM: tl.constexpr):
    ctx.all_gather(computed(tile, src), dst, DIM)


@triton.jit
def call_all_to_all(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, N_PER_RANK: tl.constexpr):
    ctx.all_to_all(tile, src, dst, N_PER_RANK)


@triton.jit
def call_gather(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, SOURCE: tl.constexpr):
    pointers, mask = dst.tile_ptr(tile)
    tl.store(pointers, ctx.gather(tile, src, SOURCE), mask=mask)


@triton.jit
def call_atomic(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    ctx.all_reduce_atomic(computed(tile, src), dst)


@triton.jit
def call_spinlock(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    ctx.all_reduce_spinlock(computed(tile, src), dst, words_ptr)


@triton.jit
def call_ring(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    ctx.all_reduce_ring(tile, src, dst)


@triton.jit
def call_one_shot(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    ctx.all_reduce_one_shot(published(tile, src, ctx, words_ptr), src, dst, words_ptr)


@triton.jit
def call_two_shot(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    ctx.all_reduce_two_shot(published(tile, src, ctx, words_ptr), src, dst, words_ptr)


@triton.jit
def call_reduce_scatter(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    ctx.reduce_scatter(published(tile, src, ctx, words_ptr), src, dst, words_ptr)


def exchanged(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.cat([one.chunk(len(inputs), 1)[rank] for one in inputs], 1)


METHODS = {
    "all_gather_0": Collective(call_all_gather, lambda inputs, rank: torch.cat(inputs, 0), 0, dst=0, barriers=True),
    "all_gather_1": Collective(call_all_gather, lambda inputs, rank: torch.cat(inputs, 1), 1, dst=1, barriers=True),
    "all_to_all": Collective(call_all_to_all, exchanged, "columns", src=1, dst=1, of_dst=True, barriers=True),
    "gather": Collective(call_gather, lambda inputs, rank: inputs[-1], -1, barriers=True),
    "all_reduce_atomic": Collective(call_atomic, total, initial=0, atomic=True, barriers=True),
    "all_reduce_spinlock": Collective(call_spinlock, total, initial=0, barriers=True),
    "all_reduce_ring": Collective(call_ring, total, barriers=True),
    "all_reduce_one_shot": Collective(call_one_shot, total, barriers=True),
    "all_reduce_two_shot": Collective(call_two_shot, total, barriers=True),
    "reduce_scatter": Collective(call_reduce_scatter, own_tiles, barriers=True),
}
AWAITED = ["all_reduce_one_shot", "all_reduce_two_shot", "reduce_scatter"]


def method(name: str, world_size: int) -> Collective:
    one = METHODS[name]
    return replace(one, parameter=world_size - 1) if name == "gather" else one


def run(rank: int, world_size: int, name: str, dtypes: list[torch.dtype]) -> None:
    for dtype in dtypes:
        if not (dtype in NO_ATOMICS and METHODS[name].atomic):
            collective = Run(context(), method(name, world_size), PART, dtype, flagged=False)
            for call in (1, 2):
                collective.check(call, dtype)
            collective.free()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", METHODS)
def test_gives_what_it_is_defined_to_give(ranks: Callable[[int], Ranks], name: str, world_size: int) -> None:
    ranks(world_size).call(run, name, DTYPES if world_size == 2 else [torch.float32])


def run_checked(rank: int, world_size: int, name: str) -> None:
    with iris_core.iris(1 << 21) as ctx:
        collective = Run(ctx, method(name, world_size), (8, 21), torch.float32, flagged=False)
        for call in (1, 2):
            collective.check(call, torch.float32)
        ctx.barrier()


@pytest.mark.parametrize("name", METHODS)
def test_no_race(name: str) -> None:
    report = check(run_checked, 3, args=(name,), schedules=2)
    assert report.ok, report


@triton.jit
def no_wait(word_ptr, watchdog_ptr):
    pass


@pytest.mark.parametrize("name", AWAITED)
def test_without_its_wait_it_races(name: str) -> None:
    with mock.patch.object(tiles, "_await", no_wait):
        assert check(run_checked, 3, args=(name,), schedules=4).races


def test_without_the_lock_additions_race() -> None:
    with mock.patch.object(tiles, "_take", no_wait):
        assert check(run_checked, 3, args=("all_reduce_spinlock",), schedules=4).races


@triton.jit
def call_unpublished(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    ctx.all_reduce_one_shot(computed(tile, src), src, dst, words_ptr)


@triton.jit
def call_locked(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    tl.store(words_ptr + dst.tile_id(tile), 1)
    ctx.all_reduce_spinlock(computed(tile, src), dst, words_ptr)


STUCK: dict[str, Any] = {"ready": call_unpublished, "lock": call_locked}


def wait_in_vain(rank: int, world_size: int, name: str) -> tuple[str, str]:
    ctx = context()
    collective = Run(ctx, Collective(STUCK[name], total, barriers=True), (8, 16), torch.float32, flagged=False)
    with short_limit(ctx):
        found = raised(collective.check, 1, torch.float32)
    ctx.reset()
    collective.free()
    return found


@pytest.mark.parametrize("name", STUCK)
def test_waits_are_bounded(ranks: Callable[[int], Ranks], name: str) -> None:
    for kind, text in ranks(2).call(wait_in_vain, name):
        assert kind == "TimeoutError", text
