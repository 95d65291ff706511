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
    "zeros of a tuple in a tuple": lambda make, kw: make.zeros((2, 3) if make is torch else ((2, 3),), **kw),
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
    "linspace of a size": lambda make, kw: make.linspace(0, 1, 5 if make is torch else (5,), **kw),
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


LAID_OUT = {
    "channels last": lambda make, kw: (
        make.zeros(2, 3, 4, 5, **kw).contiguous(memory_format=torch.channels_last)
        if make is torch
        else make.zeros(2, 3, 4, 5, memory_format=torch.channels_last)
    ),
    "as the other": lambda make, kw: make.zeros_like(torch.ones(2, 3).t(), memory_format=torch.preserve_format, **kw),
    "as the other unasked": lambda make, kw: make.zeros_like(torch.ones(2, 3).t(), **kw),
    "as the other's channels": lambda make, kw: make.zeros_like(
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), memory_format=torch.preserve_format, **kw
    ),
    "contiguous": lambda make, kw: make.zeros_like(torch.ones(2, 3).t(), memory_format=torch.contiguous_format, **kw),
}


def lay_out(rank: int, world_size: int) -> None:
    ctx = context()
    for what, call in LAID_OUT.items():
        expected, made = call(torch, {}), call(ctx, {})
        assert (made.shape, made.stride()) == (expected.shape, expected.stride()), what
        assert ctx.heap.contains(made)
        made.fill_(rank)
        ctx.barrier()
        assert [view.unique().tolist() for view in ctx.peer_view(made)] == [[0], [1]]
        ctx.barrier()
        ctx.free(made)
    ctx.barrier()


def test_elements_lie_as_torch_lays_them(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(lay_out)


def take_flat_output(rank: int, world_size: int) -> None:
    ctx = context()
    flat = ctx.full((6,), -1.0)
    made = ctx.ones(2, 3, out=flat)
    assert (made.shape, made.data_ptr()) == ((2, 3), flat.data_ptr())
    assert (flat == 1).all()
    ctx.free(flat)
    ctx.barrier()


def test_a_flat_output_is_viewed_in_the_shape(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(take_flat_output)


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


OUT = {
    "zeros": lambda make, out: make.zeros(2, 3, out=out),
    "ones": lambda make, out: make.ones((2, 3), out=out),
    "full": lambda make, out: make.full((2, 3), 5, out=out),
    "empty": lambda make, out: make.empty(2, 3, out=out).fill_(1),
    "arange": lambda make, out: make.arange(6, out=out.view(-1)),
    "linspace": lambda make, out: make.linspace(0, 1, 6, out=out.view(-1)),
    "rand": lambda make, out: make.rand(2, 3, out=out),
    "randn": lambda make, out: make.randn(2, 3, out=out),
    "randint": lambda make, out: make.randint(9, (2, 3), out=out, dtype=out.dtype),
}


def take_torchs_arguments(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    ctx = context()
    for what, call in OUT.items():
        expected, own = torch.full((2, 3), -1.0, device=ctx.get_device()), ctx.full((2, 3), -1.0)
        in_use = ctx.heap.allocator.used_bytes
        for made in (expected, own):
            torch.manual_seed(rank)
            result = call(torch if made is expected else ctx, made)
            assert result.data_ptr() == made.data_ptr(), what
        assert torch.equal(own, expected), what
        assert ctx.heap.allocator.used_bytes == in_use
        ctx.free(own)
    trained = ctx.ones(3, requires_grad=True, layout=torch.strided, pin_memory=False)
    (trained * 2).sum().backward()
    assert torch.equal(trained.grad, torch.full_like(trained, 2.0))  # type: ignore[arg-type]
    like = ctx.zeros_like(trained, memory_format=torch.preserve_format)
    assert not like.requires_grad
    before = ctx.heap.allocator.used_bytes
    errors = {
        "layout": raised(ctx.zeros, 3, layout=torch.sparse_coo),
        "pinned": raised(ctx.empty, 3, pin_memory=True),
        "format": raised(ctx.empty, 1, 2, 3, memory_format=torch.channels_last),
        "integers": raised(ctx.arange, 3, requires_grad=True),
        "out elsewhere": raised(ctx.zeros, 3, out=torch.empty(3)),
        "out of a shape": raised(ctx.zeros, 4, out=like),
        "out of a dtype": raised(ctx.zeros, 3, out=like, dtype=torch.int8),
        "out of a dtype to copy to": raised(ctx.linspace, 0, 1, 3, out=like, dtype=torch.float64),
        "unknown": raised(ctx.zeros, 3, colour="red"),
    }
    assert ctx.heap.allocator.used_bytes == before
    ctx.free(trained)
    ctx.free(like)
    ctx.barrier()
    return errors


REFUSED = {
    "layout": ("ValueError", "torch.sparse_coo; tensors on the heap are torch.strided"),
    "pinned": ("RuntimeError", "only dense CPU tensors can be pinned"),
    "format": ("RuntimeError", "required rank 4 tensor to use channels_last format"),
    "integers": ("RuntimeError", "floating point and complex dtype can require gradients, not torch.int64"),
    "out elsewhere": ("RuntimeError", "not on the heap; it takes (3,)"),
    "out of a shape": ("RuntimeError", "out is (3,) of torch.float32, on the heap; it takes (4,)"),
    "out of a dtype": ("RuntimeError", "it takes (3,) of torch.int8"),
    "out of a dtype to copy to": ("RuntimeError", "it takes (3,) of torch.float64"),
    "unknown": ("TypeError", "colour"),
}


def test_torchs_arguments_are_taken_or_refused(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).call(take_torchs_arguments):
        assert errors.keys() == REFUSED.keys()
        for what, (kind, part) in REFUSED.items():
            assert errors[what][0] == kind, what
            assert part in errors[what][1], what


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
        "peer view of a negation": raised(ctx.peer_view, torch._neg_view(buffer)),
        "another device": raised(ctx.zeros, 3, device="meta"),
        "no steps": raised(ctx.arange, 1, 5, 0),
        "steps away": raised(ctx.arange, 5, 1),
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
    "peer view of a negation": ("ValueError", ["a negated or conjugated view has no peers' views"]),
    "another device": ("RuntimeError", ["meta", "heap"]),
    "no steps": ("ValueError", ["step must be non-zero"]),
    "steps away": ("ValueError", ["from 5 to 1"]),
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
