"""Tensors on the heap are what torch would have made, and their memory is given back and used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks, context, raised

# Each is called with the context and with torch.
CREATED: dict[str, Callable[[Any, dict[str, Any]], torch.Tensor]] = {
    "zeros": lambda make, kw: make.zeros(2, 3, **kw),
    "zeros of numpy's": lambda make, kw: make.zeros(np.int64(3), **kw),
    "zeros of a tuple": lambda make, kw: make.zeros((2, 3), **kw),
    "zeros of a size": lambda make, kw: make.zeros(torch.Size([4]), dtype=torch.int8, **kw),
    "zeros without dimensions": lambda make, kw: make.zeros((), **kw),
    "zeros without elements": lambda make, kw: make.zeros(3, 0, 2, **kw),
    "ones": lambda make, kw: make.ones(5, dtype=torch.bool, **kw),
    "ones of bf16": lambda make, kw: make.ones([2, 2], dtype=torch.bfloat16, **kw),
    "full of a float": lambda make, kw: make.full((3, 2), 1.5, **kw),
    "full of an integer": lambda make, kw: make.full((3,), 7, **kw),
    "full of a truth": lambda make, kw: make.full((3,), True, **kw),
    "full of a dtype": lambda make, kw: make.full((2,), 3, dtype=torch.float16, **kw),
    "zeros_like": lambda make, kw: make.zeros_like(torch.ones(2, 5, dtype=torch.int16), **kw),
    "zeros_like of a dtype": lambda make, kw: make.zeros_like(torch.ones(2, 5), dtype=torch.float64, **kw),
    "arange": lambda make, kw: make.arange(7, **kw),
    "arange from": lambda make, kw: make.arange(2, 9, **kw),
    "arange by": lambda make, kw: make.arange(2, 9, 3, dtype=torch.int32, **kw),
    "arange of floats": lambda make, kw: make.arange(0, 1, 0.25, **kw),
    "arange downwards": lambda make, kw: make.arange(5, 0, -2, **kw),
    "linspace": lambda make, kw: make.linspace(-1.0, 2.0, 7, **kw),
    "linspace of a dtype": lambda make, kw: make.linspace(0, 10, 5, dtype=torch.float64, **kw),
    "rand": lambda make, kw: make.rand(40, 3, **kw),
    "rand of a dtype": lambda make, kw: make.rand((50,), dtype=torch.float64, **kw),
    "randn": lambda make, kw: make.randn(40, 3, **kw),
    "randint": lambda make, kw: make.randint(-3, 9, (50,), **kw),
    "randint from 0": lambda make, kw: make.randint(9, (50,), **kw),
    "randint from 0 of a named size": lambda make, kw: make.randint(9, size=(50,), **kw),
    "randint by names": lambda make, kw: make.randint(low=-3, high=9, size=(50,), **kw),
    "randint by names from 0": lambda make, kw: make.randint(high=9, size=(50,), **kw),
    "randint of a dtype": lambda make, kw: make.randint(0, 2, (50,), dtype=torch.int32, **kw),
}


def compare_with_torch(rank: int, world_size: int, what: str) -> None:
    ctx = context()
    device = ctx.get_device()
    torch.manual_seed(rank)
    expected = CREATED[what](torch, {"device": device})
    torch.manual_seed(rank)
    filler = ctx.full((1 << 12,), -1, dtype=torch.int8)  # what freed memory held must not show
    ctx.free(filler)
    made = CREATED[what](ctx, {})
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    assert made.is_contiguous()
    assert ctx.heap.contains(made)
    ctx.free(made)
    with torch.device("meta"):  # torch's default is not the heap's
        same_device = CREATED[what](ctx, {"device": device.type})
    torch.testing.assert_close(same_device.shape, expected.shape)
    assert same_device.device == device
    ctx.free(same_device)
    ctx.barrier()


@pytest.mark.parametrize("what", CREATED)
def test_a_tensor_is_as_torch_makes_it(ranks: Callable[[int], Ranks], what: str) -> None:
    ranks(2).call(compare_with_torch, what)


def draw(rank: int, world_size: int) -> None:
    ctx = context()
    values = ctx.uniform((10_000,), -2.0, 6.0)
    assert values.min() >= -2
    assert values.max() < 6
    assert abs(values.mean().item() - 2) < 0.2
    for method, arguments in (("rand", (8,)), ("randn", (8,)), ("randint", (0, 100, (8,)))):
        drawn = []
        for _ in range(2):
            generator = torch.Generator(ctx.get_device()).manual_seed(5)
            drawn.append(getattr(ctx, method)(*arguments, generator=generator))
        assert torch.equal(*drawn), method
        for tensor in drawn:
            ctx.free(tensor)
    ctx.free(values)
    empty = ctx.empty(3, 4, dtype=torch.float16)
    assert (empty.shape, empty.dtype) == ((3, 4), torch.float16)
    ctx.free(empty)
    ctx.barrier()


def test_random_values_have_their_range_and_generator(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(draw)


def free_and_reuse(rank: int, world_size: int) -> None:
    ctx = context()
    before = ctx.heap.allocator.used_bytes
    first, second, third = (ctx.zeros(1000, dtype=torch.int64) for _ in range(3))
    addresses = first.data_ptr(), second.data_ptr()
    first.fill_(1)
    third.fill_(3)
    ctx.free(first)
    ctx.free(second)
    both = ctx.full((2000,), 2)  # only the two together have room for it
    assert both.data_ptr() == min(addresses)
    assert (third == 3).all()
    ctx.free(both)
    ctx.free(third)
    assert ctx.heap.allocator.used_bytes == before
    ctx.barrier()


def test_freed_memory_is_used_again(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(free_and_reuse)


def make_mistakes(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    ctx = context()
    before = ctx.heap.allocator.used_bytes
    buffer = ctx.zeros(100)
    elsewhere = torch.zeros(3, device=ctx.get_device())
    errors = {
        "free elsewhere": raised(ctx.free, elsewhere),
        "free a part": raised(ctx.free, buffer[50:]),
        "peer view elsewhere": raised(ctx.peer_view, elsewhere),
        "another device": raised(ctx.zeros, 3, device="meta"),
        "no such values": raised(ctx.randn, 1000, dtype=torch.int32),
        "too much": raised(ctx.empty, ctx.heap.stride, dtype=torch.float64),
    }
    ctx.free(buffer)
    errors["free again"] = raised(ctx.free, buffer)
    assert ctx.heap.allocator.used_bytes == before
    ctx.barrier()  # a refused call leaves the ranks' histories alike
    return errors


MISTAKES = {
    "free elsewhere": ("ValueError", ["(3,)", "symmetric heap", "ctx.zeros"]),
    "free a part": ("ValueError", ["no allocation starts"]),
    "peer view elsewhere": ("ValueError", ["not on rank", "symmetric heap"]),
    "another device": ("ValueError", ["meta", "heap"]),
    "no such values": ("NotImplementedError", ["normal"]),
    "too much": ("HeapExhausted", ["exhausted", "needs", "in use", "free", "heap_size"]),
    "free again": ("ValueError", ["freed already"]),
}


def test_mistakes_are_refused_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).call(make_mistakes):
        assert errors.keys() == MISTAKES.keys()
        for what, (kind, parts) in MISTAKES.items():
            assert errors[what][0] == kind, what
            for part in parts:
                assert part in errors[what][1], what


def randint_without(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    return [raised(ctx.randint, *given) for given in ((), (5,), (None, (3,)))]


def test_randint_needs_an_end_and_a_size(ranks: Callable[[int], Ranks]) -> None:
    """As torch's does: without an end, values would be of the dtype's whole range."""
    wanted = ("TypeError", "randint takes (high, size) or (low, high, size)")
    assert ranks(2).call(randint_without) == [[wanted] * 3] * 2
