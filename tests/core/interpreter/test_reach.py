"""Pointers of interpreted kernels: what they may touch, and what is said of those that point elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ranks import HEAP_SIZES, Ranks, context, raised

import iris_core
from iris_core.checker import check
from iris_core.interpreter import grid
from iris_core.interpreter.memory_bounds import MemoryBounds, span_of

on_cpu = pytest.mark.parametrize("device", ["cpu"])
SIZE = 16
FAR = 1 << 40  # bytes
HEAP = HEAP_SIZES["cpu"]
NEXT_HEAP = "the heaps' distance, in elements"


@triton.jit
def store_kernel(buffer_ptr, first, peer, rank, heap_bases, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    iris_core.store(buffer_ptr + first + offsets, offsets, rank, peer, heap_bases, mask=offsets < SIZE - 1)


@triton.jit
def load_kernel(buffer_ptr, first, peer, rank, heap_bases, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    iris_core.get(buffer_ptr + first + offsets, buffer_ptr + offsets, rank, peer, heap_bases)


@triton.jit
def add_kernel(buffer_ptr, first, peer, rank, heap_bases, SIZE: tl.constexpr):
    iris_core.atomic_add(buffer_ptr + first, 1, rank, peer, heap_bases)


@triton.jit
def translate_kernel(buffer_ptr, first, peer, rank, heap_bases, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    there = iris_core.translate(buffer_ptr + first + offsets, rank, peer, heap_bases)
    tl.store(there, offsets, mask=offsets < SIZE - 1)


@triton.jit
def cas_kernel(buffer_ptr, first, peer, rank, heap_bases, SIZE: tl.constexpr):
    iris_core.atomic_cas(buffer_ptr + first, 1, 2, rank, peer, heap_bases)


KERNELS = (store_kernel, load_kernel, add_kernel, cas_kernel, translate_kernel)
NOT_ON_THE_HEAP = (
    "a kernel reaches for a peer's copy of (16,) of torch.int32, an argument of {kernel}, which is not on "
    "the symmetric heap; allocate it with the context (ctx.zeros, ctx.empty, ...)"
)
NO_MEMORY = "a kernel reaches for a peer's copy where it has no memory: "
# What rank 0 gives as the buffer, the first element, the peer and its own rank, and what is said.
MISTAKES = {
    "a tensor that is not on the heap": (True, 0, 1, 0, NOT_ON_THE_HEAP),
    "an offset past all heaps": (False, FAR // 4, 1, 0, NO_MEMORY + "far from all"),
    "an offset into the next heap": (False, NEXT_HEAP, 1, 0, "from rank 0's heap that is on rank 1's"),
    "ranks swapped": (False, 0, 0, 1, "a kernel translates a pointer from rank 1's heap that is on rank 0's; are the"),
    "a rank past the last": (False, 0, 2, 0, "a kernel names rank 2; there are 2 ranks, 0 to 1"),
    "a negative rank": (False, 0, 1, -1, "a kernel names rank -1; there are 2 ranks, 0 to 1"),
    "not on the heap, to itself": (True, 0, 0, 0, NOT_ON_THE_HEAP),
}


def said(mistake: str, kernel: Any) -> str:
    return MISTAKES[mistake][-1].format(kernel=kernel.fn.__name__)


def reach_for(ctx: Any, kernel: Any, mistake: str) -> None:
    is_local, first, peer, rank, _ = MISTAKES[mistake]
    local = torch.zeros(SIZE, dtype=torch.int32)
    buffer = local if is_local else ctx.zeros(SIZE, dtype=torch.int32)
    ctx.barrier()
    try:
        if ctx.get_rank() == 0:
            offset = ctx.heap.stride // 4 if first is NEXT_HEAP else first
            kernel[(1,)](buffer, offset, peer, rank, ctx.get_heap_bases(), SIZE)
    finally:
        if not is_local:
            ctx.free(buffer)


def reach_interpreted(rank: int, world_size: int, mistake: str) -> list[tuple[str, str]]:
    ctx = context()
    attempt = raised if rank == 0 else lambda fn, *args: fn(*args)
    errors = [attempt(reach_for, ctx, kernel, mistake) for kernel in KERNELS]
    ctx.barrier()
    return errors


@on_cpu
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_pointer_to_no_memory_is_an_error(ranks: Callable[[int], Ranks], mistake: str) -> None:
    errors, _ = ranks(2).call(reach_interpreted, mistake)
    for kernel, (kind, message) in zip(KERNELS, errors, strict=True):
        assert kind == "InterpreterError"
        assert said(mistake, kernel) in message


def reach_checked(rank: int, world_size: int, mistake: str, kernel: Any) -> None:
    ctx = iris_core.iris(HEAP)
    reach_for(ctx, kernel, mistake)
    ctx.barrier()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_race_checker_says_whose_pointer_at_which_line_points_to_no_memory(mistake: str, kernel: Any) -> None:
    (error,) = check(reach_checked, 2, args=(mistake, kernel)).errors
    name = kernel.fn.__name__
    assert f"rank 0, program 0, of {name}: ValueError: a kernel " in error
    assert said(mistake, kernel) in error.replace(f"{name} on rank 0", name)
    assert "test_reach.py:" in error
    assert f"({name})" in error
    assert "in 4 schedules" in error


@triton.jit
def masked_kernel(buffer_ptr, stray, peer, rank, heap_bases, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    is_used = lanes == SIZE // 2
    pointers = buffer_ptr + tl.where(is_used, 0, stray)
    value = iris_core.load(pointers, rank, peer, heap_bases, mask=is_used)
    iris_core.store(pointers, value + 1, rank, peer, heap_bases, mask=is_used)
    iris_core.atomic_add(pointers, 1, rank, peer, heap_bases, mask=is_used)
    tl.store(iris_core.translate(pointers + 1, rank, peer, heap_bases), lanes, mask=is_used)


def stray_where_masked(rank: int, world_size: int) -> list[list[int]]:
    ctx = context()
    buffer = ctx.zeros(2, dtype=torch.int32)
    found = []
    for stray in (FAR // 4, HEAP // 4, -HEAP // 4, -FAR // 4):
        buffer.zero_()
        ctx.barrier()
        masked_kernel[(1,)](buffer, stray, 1 - rank, rank, ctx.get_heap_bases(), SIZE)
        ctx.barrier()
        found.append(buffer.tolist())
    ctx.free(buffer)
    return found


@on_cpu
def test_lanes_that_are_masked_may_point_anywhere(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(stray_where_masked) == [[[2, SIZE // 2]] * 4] * 2


@triton.jit
def read_by_table_kernel(table_ptr, out_ptr):
    first = tl.load(table_ptr).to(tl.pointer_type(tl.int32))
    tl.store(out_ptr, tl.load(first))


def read_by_table(rank: int, world_size: int) -> None:
    ctx = iris_core.iris(1 << 20)
    told = torch.full((1,), 7, dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    read_by_table_kernel[(1,)](torch.tensor([told.data_ptr()]), out)
    assert out.item() == 7
    ctx.close()


def read_by_table_interpreted(rank: int, world_size: int) -> None:
    context()
    told, out = torch.full((1,), 7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    read_by_table_kernel[(1,)](torch.tensor([told.data_ptr()]), out)
    assert out.item() == 7


@on_cpu
def test_an_address_that_a_kernel_has_read_from_memory_is_as_good(ranks: Callable[[int], Ranks]) -> None:
    ranks(1).call(read_by_table_interpreted)
    report = check(read_by_table, 1, schedules=1)
    assert report.ok, report


def test_memory_in_parts_is_found_wherever_it_lies() -> None:
    whole = np.zeros(100, dtype=np.int64)
    inner, other = torch.from_numpy(whole[10:20]), torch.zeros(5, dtype=torch.int64)
    reach = MemoryBounds()
    for tensor in (inner, torch.from_numpy(whole), inner, other):
        reach.add(span_of(tensor, "it"))
    assert len(reach._spans) == 2
    start = whole.ctypes.data
    for address in (start, start + 8 * 15, start + 8 * 50, start + 8 * 99, other.data_ptr()):
        assert reach.find(address, 8)
    for address in (start - 1, start + 8 * 99 + 1, other.data_ptr() + 33):
        assert not reach.find(address, 8)


@triton.jit
def wait_and_tell_kernel(flag_ptr, out_ptr, watchdog_ptr):
    iris_core.wait(flag_ptr, 1, watchdog_ptr)
    tl.store(out_ptr, tl.program_id(0) + 1)


def launch_in_two_threads(rank: int, world_size: int) -> list[int]:
    """While the first thread's kernel polls, the second launches one that does, too; then what both wait for comes."""
    ctx = context()
    flags, out = ctx.zeros(2, dtype=torch.int64), ctx.zeros(2, dtype=torch.int64)
    watchdog, is_beside = ctx.get_watchdog(), threading.Event()
    first, launched = threading.get_ident(), []

    def launch(index: int) -> None:
        wait_and_tell_kernel[(2,)](flags[index:], out[index:], watchdog)

    def rest(looks: int) -> None:
        if threading.get_ident() != first:
            is_beside.set()
        elif not launched:
            launched.append(threads.submit(launch, 1))
            is_beside.wait(timeout=0.5)  # in vain, as threads take turns
        elif looks > 2:
            flags.fill_(1)

    with ThreadPoolExecutor() as threads, mock.patch.object(grid, "back_off", rest):
        launch(0)
        launched[0].result()
    found = out.tolist()
    ctx.free(flags)
    ctx.free(out)
    return found


@on_cpu
def test_threads_that_launch_kernels_take_turns(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(1).call(launch_in_two_threads) == [[2, 2]]


def launch_in_a_thread(rank: int, world_size: int) -> None:
    iris_core.iris(1 << 20)
    flag, out = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with ThreadPoolExecutor() as threads:
        threads.submit(lambda: read_by_table_kernel[(1,)](flag, out)).result()


def test_the_race_checker_refuses_threads() -> None:
    (error,) = check(launch_in_a_thread, 1, schedules=1).errors
    assert "RuntimeError: a thread that a rank has started launches read_by_table_kernel" in error
