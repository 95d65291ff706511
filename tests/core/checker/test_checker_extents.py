"""Accesses to the heap beside its tensors: what they hit is another's, or will be, and nothing else says so."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import iris_core
from iris_core import HeapExhausted
from iris_core.checker import check
from iris_core.checker.extents import Extents
from iris_core.heap.allocator import ALIGNMENT, OffsetAllocator


@triton.jit
def move_kernel(source_ptr, target_ptr, count, rank, peer, heap_bases, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    value = tl.load(source_ptr + lanes, mask=lanes < count)
    iris_core.store(target_ptr + lanes, value, rank, peer, heap_bases, mask=lanes < count)


def move(rank: int, world_size: int, sizes: tuple[int, int], count: int) -> None:
    """Move so many elements from a tensor of the first size to the peer's tensor of the second."""
    ctx = iris_core.iris(1 << 20)
    source, target = (ctx.zeros(size, dtype=torch.float32) for size in sizes)
    ctx.zeros(1024, dtype=torch.float32)  # there is a tensor behind
    ctx.barrier()
    move_kernel[(1,)](source, target, count, rank, (rank + 1) % world_size, ctx.get_heap_bases(), BLOCK=512)
    ctx.barrier()
    ctx.close()


@pytest.mark.parametrize("size", [256, 250])  # allocated sizes are multiples of 1,024 bytes, of 256 elements
def test_elements_past_the_end_are_found(size: int) -> None:
    (written,) = check(move, 2, args=((512, size), size + 1), schedules=2).errors
    assert f"a kernel writes past a tensor's end: byte {4 * size} of ({size},) of torch.float32\n" in written
    assert "(move_kernel)" in written
    (read,) = check(move, 2, args=((size, 512), size + 1), schedules=2).errors
    assert f"a kernel reads past a tensor's end: byte {4 * size} of ({size},) of torch.float32\n" in read


def test_a_whole_tensor_is_none_too_many() -> None:
    assert check(move, 2, args=((250, 256), 250), schedules=2).ok


def test_where_the_gaps_fill_the_heap_that_is_said() -> None:
    allocator = OffsetAllocator(4 * ALIGNMENT)
    Extents().watch(allocator)
    assert [allocator.allocate(ALIGNMENT, "a tensor") for _ in range(2)] == [0, 2 * ALIGNMENT]
    with pytest.raises(HeapExhausted, match="under the checker each tensor takes 1,024 bytes more"):
        allocator.allocate(1, "one more")


def free_at_once(rank: int, world_size: int) -> None:
    """Free what queued kernels use."""
    ctx = iris_core.iris(1 << 20)
    source, target = (ctx.zeros(256, dtype=torch.float32) for _ in range(2))
    ctx.barrier()
    move_kernel[(1,)](source, target, 256, rank, rank, ctx.get_heap_bases(), BLOCK=256)
    for tensor in (source, target):
        ctx.free(tensor)
    ctx.barrier()
    ctx.close()


def test_what_is_freed_behind_a_kernel_is_no_mistake() -> None:
    assert check(free_at_once, 2, schedules=2).ok
