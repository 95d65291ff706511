"""Tile-level collectives against their definitions: 1 to 3 ranks, dtypes, sizes that no tile divides, called again."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from limits import short_limit
from ranks import Ranks, context, raised
from tile_collectives import COLLECTIVES, OUTSIDE, Run

SHAPES = [(16, 32), (13, 21)]  # tiles divide the first, and nothing divides the second
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int8]
ATOMIC = {torch.float16, torch.bfloat16, torch.float64, torch.int32}  # dtypes that are added to atomically here
IN_RANK_ORDER = ["all_reduce_one_shot", "all_reduce_two_shot", "reduce", "reduce_scatter"]


def run(rank: int, world_size: int, name: str, shape: tuple[int, int], dtype: torch.dtype, counted: bool) -> None:
    collective = Run(context(), COLLECTIVES[name], shape, dtype, counted=counted)
    for call in (1, 2, 3):
        collective.check(call, dtype)
    collective.free()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_gives_what_it_is_defined_to_give(ranks: Callable[[int], Ranks], name: str, world_size: int) -> None:
    for shape in SHAPES if world_size == 3 else SHAPES[1:]:
        ranks(world_size).call(run, name, shape, torch.float32, True)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_dtype_and_epochs_of_the_caller(ranks: Callable[[int], Ranks], name: str) -> None:
    for dtype in DTYPES:
        if dtype in ATOMIC or not COLLECTIVES[name].atomic:
            ranks(2).call(run, name, SHAPES[1], dtype, False)


def sum_apart(rank: int, world_size: int, name: str, dtype: torch.dtype, values: list[float]) -> float:
    collective = Run(context(), COLLECTIVES[name], (3, 4), dtype)
    output = collective(1, torch.full((3, 4), values[rank]))[:, :4]
    collective.free()
    assert (output == output[0, 0]).all()
    return output[0, 0].item()


@pytest.mark.parametrize("name", IN_RANK_ORDER)
@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.bfloat16, [256.0, 1.0, 1.0], 258.0),  # 256, if partial sums were rounded
        (torch.float32, [2.0**24, 1.0, -(2.0**24)], 0.0),  # 1, in an order that adds the large ones first
        (torch.float32, [1.0, 2.0**24, -(2.0**24)], 0.0),
    ],
)
def test_sums_are_fp32_in_the_order_of_ranks(
    ranks: Callable[[int], Ranks], name: str, dtype: torch.dtype, values: list[float], expected: float
) -> None:
    found = ranks(3).call(sum_apart, name, dtype, values)
    assert set(found) <= {expected, OUTSIDE}
    assert expected in found


def wait_in_vain(rank: int, world_size: int, name: str) -> tuple[str, str]:
    """The last rank makes no call. Locks are taken for good, with no flags to be waited for first."""
    ctx = context()
    takes_lock = name == "all_reduce_spinlock"
    collective = Run(ctx, COLLECTIVES[name], (3, 4), torch.float32, flagged=not takes_lock)
    watched = [collective.words] if collective.flags is None else [collective.words, collective.flags]
    for words, what in zip(watched, ("word", "flag"), strict=False):
        ctx.watchdog.watch(words, lambda word, _, what=what: f"{what} {word}")
    collective.words[0, 0] = int(takes_lock)
    ctx.barrier()
    with short_limit(ctx):
        if rank < world_size - 1:
            collective(1, torch.ones(3, 4))
            ctx.backend.synchronize()
    error = raised(ctx.barrier)
    for words in watched:
        ctx.watchdog.unwatch(words)
    ctx.reset()
    collective.free()
    return error


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("all_reduce_one_shot", "flag 1"),
        ("all_reduce_two_shot", "flag 1"),
        ("all_reduce_ring", "flag 1"),
        ("all_reduce_spinlock", "word 1"),
        ("messages", "word 0"),
    ],
)
def test_every_wait_is_bounded(ranks: Callable[[int], Ranks], name: str, what: str) -> None:
    for kind, message in ranks(2).call(wait_in_vain, name):
        assert kind == "TimeoutError"
        # On a GPU all programs wait at once: whichever is first to give up ends the others.
        assert re.search("rank 0: program 0 (timed out|was aborted)", message), message
        assert f"waiting for {what}: expected at least" in message
