"""The device API with every type of element, and with values of another type than the memory's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from compiling import Case, StubContext, compile_kernel
from ranks import Ranks, context

import iris_core

TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64]
TYPES += [torch.float8_e5m2, torch.bfloat16, torch.float64]
ON_CPU = pytest.mark.parametrize("device", ["cpu"])


@triton.jit
def pass_on_kernel(source_ptr, inbox_ptr, pulled_ptr, rank, next_rank, heap_bases, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    value = tl.load(source_ptr + lanes)
    iris_core.store(inbox_ptr + lanes, value, rank, next_rank, heap_bases, mask=lanes < BLOCK - 3)
    iris_core.get(source_ptr + lanes, pulled_ptr + lanes, rank, next_rank, heap_bases)


def pass_on(rank: int, world_size: int, dtype: torch.dtype) -> list[str]:
    """Store to the next rank what this one has, but the last three; and get what the next one has."""
    ctx = context()
    values = [(torch.arange(16) * (owner + 3) % 5 > 1).to(dtype) for owner in range(world_size)]
    source, inbox, pulled = (ctx.zeros(16, dtype=dtype) for _ in range(3))
    source.copy_(values[rank])
    ctx.barrier()
    peer = (rank + 1) % world_size
    pass_on_kernel[(1,)](source, inbox, pulled, rank, peer, ctx.get_heap_bases(), 16)
    ctx.barrier()
    expected = values[rank - 1].clone()
    expected[-3:] = 0
    pairs = {"stored": (inbox, expected), "pulled": (pulled, values[peer]), "own": (source, values[rank])}
    wrong = [what for what, (got, want) in pairs.items() if not torch.equal(got.float(), want.float())]
    ctx.barrier()
    for buffer in (source, inbox, pulled):
        ctx.free(buffer)
    return wrong


@ON_CPU
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_elements_of_every_type_reach_the_rank_that_is_meant(ranks: Callable[[int], Ranks], dtype: torch.dtype) -> None:
    assert ranks(3).call(pass_on, dtype) == [[], [], []]


@triton.jit
def count_kernel(words_ptr, less_ptr, rank, heap_bases):
    iris_core.atomic_sub(words_ptr, tl.load(less_ptr), rank, rank, heap_bases)
    iris_core.atomic_cas(words_ptr + 1, 0, 1, rank, rank, heap_bases)
    iris_core.atomic_cas(words_ptr + 2, 7, 1, rank, rank, heap_bases)


def count(rank: int, world_size: int, dtype: torch.dtype, narrow: torch.dtype) -> list[int]:
    ctx = context()
    words = ctx.zeros(3, dtype=dtype)
    words.copy_(torch.tensor([100, 1 << 32, 7], dtype=dtype))
    count_kernel[(1,)](words, torch.ones(1, dtype=narrow), rank, ctx.get_heap_bases())
    got: list[int] = words.tolist()
    ctx.barrier()
    ctx.free(words)
    return got


@ON_CPU
@pytest.mark.parametrize("narrow", [torch.uint8, torch.int8, torch.uint32, torch.int64], ids=str)
def test_atomics_take_values_of_another_type(ranks: Callable[[int], Ranks], narrow: torch.dtype) -> None:
    """2**32 is not 0, though its lower half is."""
    assert ranks(2).call(count, torch.int64, narrow) == [[99, 1 << 32, 1]] * 2


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_atomics_on_flags_take_literals(target: str) -> None:
    case = Case("fused_sequential:portable", target, rank=1)
    ctx = StubContext(case)
    words, less = ctx.zeros(3, dtype=torch.int64), torch.ones(1, dtype=torch.uint32)
    arguments = {"words_ptr": words, "less_ptr": less, "rank": case.rank, "heap_bases": ctx.get_heap_bases()}
    assert "cas" in compile_kernel(count_kernel, arguments | {"num_warps": 1}, target).code.replace("cmpswap", "cas")
