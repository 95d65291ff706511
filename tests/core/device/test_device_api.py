"""The device API on real peers: every operation moves what it says from where it says, and atomics are atomic."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context

import iris_core

SIZE = 100  # not a power of two: the mask matters
PROGRAMS = 8


@triton.jit
def load_kernel(source_ptr, result_ptr, size, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    value = iris_core.load(source_ptr + offsets, rank, peer, heap_bases, mask=mask)
    tl.store(result_ptr + offsets, value, mask=mask)


@triton.jit
def store_kernel(source_ptr, result_ptr, size, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    value = tl.load(source_ptr + offsets, mask=mask)
    iris_core.store(result_ptr + offsets, value, rank, peer, heap_bases, mask=mask)


@triton.jit
def get_kernel(source_ptr, result_ptr, size, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    iris_core.get(source_ptr + offsets, result_ptr + offsets, peer, rank, heap_bases, mask=offsets < size)


@triton.jit
def put_kernel(source_ptr, result_ptr, size, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    iris_core.put(source_ptr + offsets, result_ptr + offsets, rank, peer, heap_bases, mask=offsets < size)


@triton.jit
def copy_kernel(source_ptr, result_ptr, size, rank, from_rank, to_rank, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    iris_core.copy(
        source_ptr + offsets, result_ptr + offsets, from_rank, to_rank, rank, heap_bases, mask=offsets < size
    )


MOVES = {"load": load_kernel, "store": store_kernel, "get": get_kernel, "put": put_kernel}


def move(rank: int, world_size: int, operation: str, dtype: torch.dtype) -> None:
    ctx = context()
    source = (ctx.arange(128, dtype=torch.int32) % 50).to(dtype) + rank
    mine = ctx.empty(128, dtype=dtype).copy_(source)
    result = ctx.full((128,), 99, dtype=dtype)
    ctx.barrier()
    peer = (rank + 1) % world_size
    MOVES[operation][(1,)](mine, result, SIZE, rank, peer, ctx.get_heap_bases(), BLOCK=128)
    ctx.barrier()
    # Read from the next rank, or written to by the one before.
    other = peer if operation in ("load", "get") else (rank - 1) % world_size
    expected = (torch.arange(128, device=ctx.get_device()) % 50).to(dtype) + other
    assert torch.equal(result[:SIZE], expected[:SIZE])
    assert (result[SIZE:] == 99).all()
    assert torch.equal(mine, source)
    ctx.free(mine)
    ctx.free(result)
    ctx.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("operation", MOVES)
def test_a_move_is_between_the_ranks_it_names(
    ranks: Callable[[int], Ranks], operation: str, dtype: torch.dtype
) -> None:
    ranks(3).call(move, operation, dtype)


@triton.jit
def move_kernel(
    mine_ptr, theirs_ptr, result_ptr, count, rank, peer, heap_bases, OPERATION: tl.constexpr, MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Move a block by any of the operations: to `result_ptr` on this rank, or to `theirs_ptr` on the peer."""
    lanes = tl.arange(0, BLOCK)
    mask = lanes < count if MASK else None
    other = tl.full((), 1, mine_ptr.dtype.element_ty) if MASK else None
    if OPERATION == "load":
        loaded = iris_core.load(mine_ptr + lanes, rank, peer, heap_bases, mask=mask, other=other)
        tl.store(result_ptr + lanes, loaded)
    elif OPERATION == "store":
        iris_core.store(theirs_ptr + lanes, tl.load(mine_ptr + lanes), rank, peer, heap_bases, mask=mask)
    elif OPERATION == "get":
        iris_core.get(mine_ptr + lanes, result_ptr + lanes, peer, rank, heap_bases, mask=mask, other=other)
    elif OPERATION == "put":
        iris_core.put(mine_ptr + lanes, theirs_ptr + lanes, rank, peer, heap_bases, mask=mask, other=other)
    else:
        iris_core.copy(mine_ptr + lanes, theirs_ptr + lanes, peer, peer, rank, heap_bases, mask=mask, other=other)


OPERATIONS = ("load", "store", "get", "put", "copy")
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COUNTS = [None, 0, 5, 16]  # of lanes that a mask selects; None for no mask


def move_everything(rank: int, world_size: int) -> None:
    ctx = context()
    peer, before = (rank + 1) % world_size, (rank - 1) % world_size
    for dtype in DTYPES:
        given = [((torch.arange(16) * 3 + owner) % 7).to(dtype) for owner in range(world_size)]
        mine = ctx.empty(16, dtype=dtype).copy_(given[rank])
        theirs, result = ctx.zeros(16, dtype=dtype), ctx.zeros(16, dtype=dtype)
        for operation in OPERATIONS:
            for count in COUNTS:
                theirs.zero_()
                result.zero_()
                ctx.barrier()
                move_kernel[(1,)](
                    mine, theirs, result, count or 0, rank, peer, ctx.get_heap_bases(), operation, count is not None, 16
                )
                ctx.barrier()
                # Lanes that no mask selects are not written, but for a load, which gives `other` there.
                source = {"load": peer, "get": peer, "store": before, "put": before, "copy": rank}[operation]
                expected = torch.full((16,), int(operation == "load"), dtype=torch.int8).to(dtype)
                moved = 16 if count is None else count
                expected[:moved] = given[source][:moved]
                found = result if operation in ("load", "get") else theirs
                assert torch.equal(found.cpu(), expected), (operation, dtype, count)
        for buffer in (result, theirs, mine):
            ctx.free(buffer)
    ctx.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_dtype_moves_under_every_mask(ranks: Callable[[int], Ranks], world_size: int) -> None:
    ranks(world_size).call(move_everything)


def copy_between(rank: int, world_size: int) -> None:
    """Every rank copies from the next rank to the one after: both are peers."""
    ctx = context()
    mine = ctx.full((128,), rank, dtype=torch.float16)
    result = ctx.full((128,), 99, dtype=torch.float16)
    ctx.barrier()
    places = ((rank + 1) % world_size, (rank + 2) % world_size)
    copy_kernel[(1,)](mine, result, SIZE, rank, *places, ctx.get_heap_bases(), BLOCK=128)
    ctx.barrier()
    assert (result[:SIZE] == (rank - 1) % world_size).all()
    assert (result[SIZE:] == 99).all()
    ctx.free(mine)
    ctx.free(result)
    ctx.barrier()


@pytest.mark.parametrize("world_size", [2, 3])  # of two ranks, the second is the one itself
def test_a_copy_may_be_run_by_a_third(ranks: Callable[[int], Ranks], world_size: int) -> None:
    ranks(world_size).call(copy_between)


@triton.jit
def atomic_kernel(words_ptr, olds_ptr, values_ptr, rank, to_rank, heap_bases, OPERATION: tl.constexpr):
    pid = tl.program_id(0)
    words = words_ptr + tl.arange(0, 4)
    value = tl.load(values_ptr + pid)
    old = OPERATION(words, value, rank, to_rank, heap_bases)
    tl.store(olds_ptr + pid * 4 + tl.arange(0, 4), old)


@triton.jit
def cas_kernel(words_ptr, olds_ptr, values_ptr, rank, to_rank, heap_bases):
    pid = tl.program_id(0)
    value = tl.load(values_ptr + pid)
    for word in range(4):
        expected = tl.cast(0, value.dtype)
        old = iris_core.atomic_cas(words_ptr + word, expected, value, rank, to_rank, heap_bases)
        tl.store(olds_ptr + pid * 4 + word, old)


def run_atomics(rank: int, world_size: int, name: str, dtype: torch.dtype, initial: int) -> tuple[list, list, list]:
    """All ranks' programs work on the same four words, the last rank's; return them, the old values, and the values."""
    ctx = context()
    last = world_size - 1
    words = ctx.full((4,), initial, dtype=dtype)
    olds = ctx.zeros(PROGRAMS, 4, dtype=dtype)
    own = range(rank * PROGRAMS, (rank + 1) * PROGRAMS)
    if name in ("and", "or", "xor"):
        values = [~(1 << i) if name == "and" else 1 << i for i in own]
    elif dtype in (torch.float16, torch.bfloat16):
        values = [1 for _ in own]  # whose sum is exact
    else:
        values = [i + 1 for i in own]
    given = torch.tensor(values, dtype=dtype, device=ctx.get_device())
    ctx.barrier()
    arguments = (words, olds, given, rank, last, ctx.get_heap_bases())
    if name == "cas":
        cas_kernel[(PROGRAMS,)](*arguments)
    else:
        atomic_kernel[(PROGRAMS,)](*arguments, OPERATION=getattr(iris_core, f"atomic_{name}"))
    ctx.barrier()
    result = ctx.peer_view(words)[last].tolist(), olds.tolist(), values
    ctx.barrier()
    ctx.free(olds)
    ctx.free(words)
    return result


INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
DTYPES_OF_ATOMICS = {
    **dict.fromkeys(("add", "sub"), (*INTEGERS, *FLOATS, torch.float16, torch.bfloat16)),
    **dict.fromkeys(("xchg", "max"), (*INTEGERS, *FLOATS)),
    "min": (*INTEGERS, torch.float32),  # of fp64 Triton 3.6 gives the old value a type of its own
    **dict.fromkeys(("cas", "and", "or", "xor"), INTEGERS),
}
ATOMICS = [(name, dtype) for name, dtypes in DTYPES_OF_ATOMICS.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype"), ATOMICS)
def test_an_atomic_loses_no_update(ranks: Callable[[int], Ranks], name: str, dtype: torch.dtype) -> None:
    initial = {"and": -1, "min": 1000}.get(name, 0)
    results = ranks(3).call(run_atomics, name, dtype, initial)
    values = [value for _, _, given in results for value in given]
    final = results[0][0]
    assert all(words == final for words, _, _ in results)
    for word in range(4):
        olds = [program[word] for _, programs, _ in results for program in programs]
        if name in ("add", "sub"):
            added = values if name == "add" else [-value for value in values]
            assert final[word] == sum(added)
            check_chain(olds, final[word], initial, added, operator.add)
        elif name == "xchg":
            assert sorted([*olds, final[word]]) == sorted([initial, *values])
        elif name == "cas":
            assert olds.count(0) == 1  # one program of all succeeded, and the others saw its value
            assert final[word] == values[olds.index(0)]
            assert set(olds) == {0, final[word]}
        elif name == "and":
            assert final[word] == ~sum(1 << i for i in range(len(values)))
            check_chain(olds, final[word], initial, values, int.__and__)
        elif name in ("or", "xor"):
            assert final[word] == sum(values)
            check_chain(olds, final[word], initial, values, int.__or__)
        else:
            assert final[word] == {"min": min, "max": max}[name](values)
            assert initial in olds


def check_chain(olds: list[int], final: int, initial: int, values: list[int], step: Callable[[int, int], int]) -> None:
    """Each update's result is what exactly one other update found, or the final value: they were made one by one."""
    assert sorted([*(step(old, value) for old, value in zip(olds, values, strict=True)), initial]) == sorted(
        [*olds, final]
    )
