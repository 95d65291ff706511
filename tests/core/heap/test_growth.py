"""A heap that grows: buffers stay, new ones are symmetric, and on failure nothing has changed on any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, close_context, raised

from iris_core import iris
from iris_core.heap.allocator import ALIGNMENT, OffsetAllocator

SIZE = 2 << 20  # bytes per rank, the least


def grow(rank: int, world_size: int) -> list[Any]:
    close_context()
    with iris(SIZE) as ctx:
        first = ctx.full((8,), rank, dtype=torch.int32)
        exhausted = raised(ctx.empty, SIZE, dtype=torch.uint8)
        ctx.grow(SIZE + 1)  # two more pages
        grown = ctx.heap.allocator.capacity
        large = ctx.full((2 * SIZE + 5,), rank, dtype=torch.uint8)  # over the end of what there was before
        ctx.barrier()
        seen = [ctx.peer_view(first)[:, 7].tolist(), ctx.peer_view(large)[:, -1].tolist()]
        ctx.barrier()
        ctx.grow(64 * SIZE)  # for what a collective works with
        ctx.ccl.all_reduce(large[-64:])  # kernels reach it
        ctx.barrier()
        seen.append(large[-64:].tolist())
        ctx.free(large)
        ctx.free(first)
        ctx.barrier()
        return [exhausted, grown, *seen]


def test_a_heap_grows_under_its_buffers(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), grown, first, large, summed in ranks(2).call(grow):
        assert kind == "HeapExhausted"
        assert "grow()" in message
        assert grown == 3 * SIZE - ALIGNMENT
        assert first == large == [0, 1]
        assert summed == [1] * 64


def fail_to_grow(rank: int, world_size: int) -> list[tuple[str, str]]:
    close_context()
    ctx = iris(SIZE)
    before = ctx.heap.allocator.capacity, ctx.heap._addresses.used_bytes
    errors = [raised(ctx.grow, size) for size in (0, 1.5, "2", (1 + rank) * SIZE, 1 << 40)]
    assert (ctx.heap.allocator.capacity, ctx.heap._addresses.used_bytes) == before
    own_memory = ctx.heap._own_memory

    def no_memory(size: int) -> Any:
        if rank == 1:
            raise OSError("no memory")
        return own_memory(size)

    ctx.heap._own_memory = no_memory
    errors.append(raised(ctx.grow, SIZE))
    ctx.heap._own_memory = own_memory
    ctx.backend.is_capturing = lambda: True  # type: ignore[method-assign]
    errors.append(raised(ctx.grow, SIZE))
    ctx.backend.is_capturing = lambda: False  # type: ignore[method-assign]
    assert (ctx.heap.allocator.capacity, ctx.heap._addresses.used_bytes) == before
    ctx.grow(SIZE)
    ctx.barrier()
    ctx.close()
    return errors


@pytest.mark.parametrize("device", ["cpu"])
def test_growth_fails_on_all_ranks_and_changes_nothing(ranks: Callable[[int], Ranks]) -> None:
    for rank, errors in enumerate(ranks(2).call(fail_to_grow)):
        kinds, messages = zip(*errors, strict=True)
        assert kinds[:4] == ("ValueError",) * 4
        assert f"rank 1: ['a file descriptor', 0, [{2 * SIZE}]]" in messages[3]
        assert kinds[4] == "HeapExhausted"
        assert "no addresses" in messages[4]
        assert kinds[5] == ("PeerError", "OSError")[rank]
        assert "no memory" in messages[5]
        assert kinds[6] == "RuntimeError"
        assert "captured" in messages[6]


@triton.jit
def read_kernel(from_ptr, to_ptr, offset):
    tl.store(to_ptr, tl.load(from_ptr + offset))


def read_past(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Read what lies between two heaps: addresses without memory, which would end the process."""
    close_context()
    with iris(SIZE) as ctx:
        buffer, to = ctx.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        end = (ctx.heap.base + SIZE - buffer.data_ptr()) // 4
        read_kernel[(1,)](buffer, to, end - 1)
        errors = [raised(read_kernel[(1,)], buffer, to, end)]
        before_next = (ctx.heap.stride - ctx.heap.offset(buffer)) // 4 - 1
        errors.append(raised(read_kernel[(1,)], ctx.peer_view(buffer), to, before_next))
        ctx.grow(SIZE)
        read_kernel[(1,)](buffer, to, end)
        ctx.barrier()
        return errors


@pytest.mark.parametrize("device", ["cpu"])
def test_the_interpreter_knows_how_far_a_heap_has_grown(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).call(read_past):
        for _, message in errors:
            assert "where it has no memory" in message
        assert "0 bytes after the end of the ranks' heaps" in errors[0][1]


def test_what_is_added_is_kept_when_allocations_are_undone() -> None:
    allocator = OffsetAllocator(4 * ALIGNMENT)
    kept = allocator.allocate(ALIGNMENT, "kept")
    before = allocator.snapshot()
    allocator.allocate(ALIGNMENT, "undone")
    allocator.add(8 * ALIGNMENT, 2 * ALIGNMENT)  # not next to what there is
    allocator.add(4 * ALIGNMENT, ALIGNMENT)  # next to it
    allocator.allocate(2 * ALIGNMENT, "undone")
    allocator.restore(before)
    assert allocator.capacity == 7 * ALIGNMENT
    assert allocator.free_bytes == 6 * ALIGNMENT
    allocator.free(kept)
    assert [allocator.allocate(size * ALIGNMENT, "") for size in (5, 2)] == [0, 8 * ALIGNMENT]
