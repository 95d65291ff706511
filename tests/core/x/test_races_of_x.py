"""The tile-level collectives under the race checker: none races, and one whose edges are taken away does."""

from __future__ import annotations

import pytest
import torch
from test_tile_collectives import BLOCK_M, BLOCK_N, all_gather_kernel, all_reduce_kernel, data_of, tiles_of

import iris_core
from iris_core import x
from iris_core.checker import check

SHAPE = (8, 21)  # two tiles, the second with columns to spare


def all_reduce(rank: int, world_size: int, name: str, flagged: bool) -> None:
    with iris_core.iris(1 << 21) as ctx:
        src, dst = ctx.zeros(SHAPE), ctx.zeros(SHAPE)
        flags = ctx.zeros(tiles_of(*SHAPE), world_size + 1, dtype=torch.int64) if flagged else None
        ctx.barrier()
        for call in (1, 2):
            src.copy_(data_of(rank, call, SHAPE, torch.float32))
            all_reduce_kernel[(tiles_of(*SHAPE),)](
                src, dst, flags, *SHAPE, src.stride(0), dst.stride(0), rank, call, ctx.get_heap_bases(),
                ctx.get_watchdog(), world_size, BLOCK_M, BLOCK_N, True, getattr(x, f"all_reduce_{name}"),
            )  # fmt: skip
            if flagged:
                assert torch.equal(dst, sum(data_of(peer, call, SHAPE, torch.float32) for peer in range(world_size)))
        ctx.barrier()


def all_gather(rank: int, world_size: int, flagged: bool) -> None:
    with iris_core.iris(1 << 21) as ctx:
        src, dst = ctx.zeros(SHAPE), ctx.zeros(SHAPE[0] * world_size, SHAPE[1])
        flags = ctx.zeros(tiles_of(*SHAPE), world_size + 1, dtype=torch.int64) if flagged else None
        ctx.barrier()
        for call in (1, 2):
            src.copy_(data_of(rank, call, SHAPE, torch.float32))
            all_gather_kernel[(tiles_of(*SHAPE),)](
                src, dst, flags, *SHAPE, src.stride(0), dst.stride(0), rank, ctx.get_heap_bases(),
                ctx.get_watchdog(), world_size, BLOCK_M, BLOCK_N, 0,
            )  # fmt: skip
            assert dst.sum().isfinite()
        ctx.barrier()


PROGRAMS = [(all_reduce, "one_shot"), (all_gather,)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: "-".join(map(str, program[1:])) or "all_gather")
def test_no_race(program: tuple, world_size: int) -> None:
    report = check(program[0], world_size, args=(*program[1:], True), schedules=3)
    assert report.ok, report


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: "-".join(map(str, program[1:])) or "all_gather")
def test_without_flags_and_barriers_it_races(program: tuple) -> None:
    assert check(program[0], 2, args=(*program[1:], False), schedules=3).races
