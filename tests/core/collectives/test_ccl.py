"""The collectives on whole tensors against their definitions: 1 to 4 ranks, dtypes, sizes, in place, groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_collectives import COLLECTIVES, Case, check_call
from ranks import Ranks, context

SIZES = [1, 64, 9000]  # elements of a part; the last takes three blocks of a program
REDUCED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16]
REDUCED += [torch.int32, torch.int64]
MOVED = [torch.bool, torch.complex64, torch.float8_e4m3fn]


def run(rank: int, world_size: int, cases: list[Case]) -> None:
    ctx = context()
    for case in cases:
        check_call(ctx, case, ctx.ccl, list(range(world_size)), None)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_gives_what_it_is_defined_to_give(ranks: Callable[[int], Ranks], name: str, world_size: int) -> None:
    cases = [Case(name, size, root=world_size - 1) for size in SIZES]
    cases += [Case(name, 1000, in_place=True), Case(name, 999, symmetric=True), Case(name, 0)]
    ranks(world_size).call(run, cases)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_dtype(ranks: Callable[[int], Ranks], name: str) -> None:
    dtypes = REDUCED if COLLECTIVES[name].reduces else [*REDUCED, *MOVED]
    ranks(2).call(run, [Case(name, 37, dtype) for dtype in dtypes])


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("name", [name for name, one in COLLECTIVES.items() if one.reduces])
def test_operations(ranks: Callable[[int], Ranks], name: str, op: str) -> None:
    ranks(3).call(run, [Case(name, 37, dtype, op=op) for dtype in (torch.bfloat16, torch.int32)])


def run_in_groups(rank: int, world_size: int) -> None:
    ctx = context()
    groups: list[Any] = [ctx.ccl.new_group(members) for members in ([2, 0], [1, 3], [1])]
    for name in COLLECTIVES:
        for group in groups:
            if rank in group.ranks:
                check_call(ctx, Case(name, 1500, root=group.ranks[-1]), ctx.ccl, list(group.ranks), group)
    ctx.barrier()


def test_groups(ranks: Callable[[int], Ranks]) -> None:
    ranks(4).call(run_in_groups)
