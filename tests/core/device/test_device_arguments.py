"""What the device API hands on to Triton: masks and `other`, modifiers, `volatile`, hints; interpreted and checked."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context, raised

import iris_core
from iris_core import iris
from iris_core.checker import check

SIZE = 20  # of 32 lanes
ON_CPU = pytest.mark.parametrize("device", ["cpu"])


@triton.jit
def load_kernel(source_ptr, result_ptr, size, rank, peer, heap_bases, OTHER: tl.constexpr, LOAD: tl.constexpr):
    lanes = tl.arange(0, 32)
    value = iris_core.load(
        source_ptr + lanes,
        rank,
        peer,
        heap_bases,
        mask=lanes < size,
        other=OTHER,
        cache_modifier=LOAD,
        volatile=True,
        hint=16,
    )
    iris_core.store(result_ptr + lanes, value, rank, rank, heap_bases, hint=16, cache_modifier=".wt")


@triton.jit
def get_kernel(source_ptr, result_ptr, size, rank, peer, heap_bases, OTHER: tl.constexpr, LOAD: tl.constexpr):
    lanes = tl.arange(0, 32)
    mask = lanes < size
    iris_core.get(source_ptr + lanes, result_ptr + lanes, rank, peer, heap_bases, mask, OTHER, LOAD, ".wt", 16)


@triton.jit
def put_kernel(source_ptr, result_ptr, size, rank, peer, heap_bases, OTHER: tl.constexpr, LOAD: tl.constexpr):
    lanes = tl.arange(0, 32)
    mask = lanes < size
    iris_core.put(source_ptr + lanes, result_ptr + lanes, rank, peer, heap_bases, mask, OTHER, LOAD, ".wt", 16)


@triton.jit
def copy_kernel(source_ptr, result_ptr, size, rank, peer, heap_bases, OTHER: tl.constexpr, LOAD: tl.constexpr):
    lanes = tl.arange(0, 32)
    mask = lanes < size
    iris_core.copy(source_ptr + lanes, result_ptr + lanes, peer, rank, rank, heap_bases, mask, OTHER, LOAD, ".wt", 16)


@triton.jit
def atomic_kernel(words_ptr, rank, heap_bases):
    lanes = tl.arange(0, 32)
    iris_core.atomic_add(words_ptr + lanes, lanes, rank, rank, heap_bases, mask=lanes < 20, hint=16)
    iris_core.atomic_cas(words_ptr + 31, 0, 7, rank, rank, heap_bases, hint=4)


KERNELS = {"load": load_kernel, "get": get_kernel, "put": put_kernel, "copy": copy_kernel}


def move(rank: int, world_size: int, operation: str, dtype: torch.dtype) -> list[float]:
    ctx = context()
    source = ctx.full((32,), rank + 1, dtype=dtype)
    result = ctx.full((32,), 9, dtype=dtype)
    ctx.barrier()
    KERNELS[operation][(1,)](source, result, SIZE, rank, 1 - rank, ctx.get_heap_bases(), 5.0, ".cg")
    ctx.barrier()
    found = result.tolist()
    ctx.free(result)
    ctx.free(source)
    return found


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("operation", KERNELS)
def test_moves_take_every_argument(ranks: Callable[[int], Ranks], operation: str, dtype: torch.dtype) -> None:
    """`other` is what a load gives where it is masked; a copy stores nothing there."""
    left_out = 5 if operation == "load" else 9
    assert ranks(2).call(move, operation, dtype) == [[peer + 1] * SIZE + [left_out] * 12 for peer in (1, 0)]


def count(rank: int, world_size: int) -> list[int]:
    ctx = context()
    words = ctx.zeros(32, dtype=torch.int32)
    atomic_kernel[(1,)](words, rank, ctx.get_heap_bases())
    found = words.tolist()
    ctx.free(words)
    return found


@ON_CPU
def test_atomics_take_hints(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(count) == [[*range(SIZE), *[0] * 11, 7]] * 2


def refused(rank: int, world_size: int, operation: str) -> tuple[str, str]:
    ctx = context()
    source = ctx.zeros(32, dtype=torch.int32)
    arguments = (source, source, SIZE, rank, rank, ctx.get_heap_bases(), 5, ".nonsense")
    error = raised(lambda: KERNELS[operation][(1,)](*arguments))
    ctx.free(source)
    return error


@ON_CPU
@pytest.mark.parametrize("operation", KERNELS)
def test_an_unknown_modifier_is_named(ranks: Callable[[int], Ranks], operation: str) -> None:
    for _, message in ranks(2).call(refused, operation):
        assert re.search(r"[Cc]ache modifier '?\.?nonsense\b", message)


@triton.jit
def look_kernel(word_ptr, result_ptr, rank, heap_bases, VOLATILE: tl.constexpr):
    found = iris_core.load(word_ptr, rank, rank, heap_bases, volatile=VOLATILE)
    tl.store(result_ptr, found)


@triton.jit
def write_kernel(word_ptr, rank, peer, heap_bases):
    iris_core.atomic_xchg(word_ptr, 1, rank, peer, heap_bases, sem="relaxed")


def write_and_look(rank: int, world_size: int, volatile: bool) -> None:
    ctx = iris(1 << 20, "cpu")
    word = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    if rank == 0:
        write_kernel[(1,)](word, 0, 1, ctx.get_heap_bases())
    else:
        look_kernel[(1,)](word, torch.zeros(1, dtype=torch.int64), 1, ctx.get_heap_bases(), volatile)
    ctx.close()


def test_a_volatile_load_is_no_race_with_an_atomic() -> None:
    assert check(write_and_look, 2, args=(True,)).ok
    assert check(write_and_look, 2, args=(False,)).races


@triton.jit
def hinted_kernel(buffer_ptr, first, rank, heap_bases, STEP: tl.constexpr, HINT: tl.constexpr):
    rows = tl.arange(0, 4)[:, None]
    offsets = first + rows * 16 + tl.arange(0, 8)[None, :] * STEP
    iris_core.store(buffer_ptr + offsets, rows, rank, rank, heap_bases, hint=HINT)


WRONG_HINTS = [
    (1, 1, (1, 8), "do not begin at a multiple of 8 bytes"),
    (0, 2, (1, 8), "are not contiguous"),
    (0, 1, (2, 1), "are not contiguous"),
    (0, 1, 8, "a hint of 1 numbers"),
]


def hint(rank: int, world_size: int, first: int, step: int, given: object) -> str | None:
    ctx = context()
    buffer = ctx.zeros(128, dtype=torch.int32)
    arguments = (buffer, first, rank, ctx.get_heap_bases(), step, given)
    try:
        hinted_kernel[(1,)](*arguments)
    except Exception as error:
        return str(error)
    finally:
        ctx.free(buffer)
    return None


@ON_CPU
@pytest.mark.parametrize(("first", "step", "given", "message"), WRONG_HINTS)
def test_a_wrong_hint_is_an_error(
    ranks: Callable[[int], Ranks], first: int, step: int, given: object, message: str
) -> None:
    for found in ranks(2).call(hint, first, step, given):
        assert message in (found or "")


@ON_CPU
@pytest.mark.parametrize("given", [(1, 8), (1, 16), (1, 2), None])
def test_a_right_hint_is_none(ranks: Callable[[int], Ranks], given: object) -> None:
    assert ranks(2).call(hint, 4, 1, given) == [None, None]
