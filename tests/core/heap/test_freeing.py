"""What gives a buffer's memory back to the heap: the buffer itself and views of it, and no tensor of an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from ranks import Ranks, context, raised

from iris_core.heap.allocator import ALIGNMENT
from iris_core.heap.heap import SymmetricHeap

SIZE = 2 << 20


@pytest.fixture(params=[(0, False), (0, True), (1, False), (1, True)], ids=str)
def heap(request: pytest.FixtureRequest) -> SymmetricHeap:
    """Return rank 0's or rank 1's heap, of either kind of backend; nothing is on it."""
    rank, storages_are_whole = request.param
    backend = mock.Mock(
        device=torch.device("cpu"),
        open_window=lambda control_plane, size: size,
        map=lambda control_plane, find, place: (0, 0),
        window=lambda: torch.zeros(2 * SIZE, dtype=torch.uint8),
        storages_are_whole=storages_are_whole,
    )
    backend.is_capturing.return_value = False
    return SymmetricHeap(mock.Mock(rank=rank, world_size=2), backend, SIZE, backend.own_memory)


def test_a_freed_tensor_does_not_free_what_has_its_place(heap: SymmetricHeap) -> None:
    old = heap.allocate((4, 8), torch.float32)
    stale = [old, old.view(-1), old.detach(), old[:2], old.view(torch.int32), heap.peer_view(old)[heap.rank]]
    heap.free(old)
    new = heap.allocate((4, 8), torch.float32)
    assert new.data_ptr() == old.data_ptr()
    for tensor in stale:
        with pytest.raises(ValueError, match=r"\(4, 8\) of torch.float32"):
            heap.free(tensor)
    assert heap.allocator.used_bytes == ALIGNMENT
    heap.free(new)
    for tensor in [new, *stale]:
        with pytest.raises(ValueError, match="freed already"):
            heap.free(tensor)
    assert heap.allocator.used_bytes == 0


@pytest.mark.parametrize(
    "view_of",
    [
        torch.Tensor.detach,
        torch.nn.Parameter,
        lambda buffer: buffer.view(-1),
        lambda buffer: buffer.t(),
        lambda buffer: buffer.view(torch.int16),
        lambda buffer: buffer.reshape(2, 16)[:],
        lambda buffer: buffer.data,
    ],
)
def test_a_view_of_all_of_a_buffer_frees_it(
    heap: SymmetricHeap, view_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    first = heap.allocate((4,), torch.float32)
    buffer = view_of(heap.allocate((4, 8), torch.float32))
    assert heap.free(buffer) == ALIGNMENT
    assert heap.free(first) == ALIGNMENT


def test_an_allocation_that_was_undone_frees_nothing_later(heap: SymmetricHeap) -> None:
    before = heap.allocator.snapshot()
    undone = heap.allocate((8,), torch.float32)
    heap.allocator.restore(before)
    kept = heap.allocate((8,), torch.float32)
    with pytest.raises(ValueError, match=r"\(8,\) of torch.float32"):
        heap.free(undone)
    heap.free(kept)


def free_twice(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    old = ctx.zeros(16)
    ctx.free(old)
    new = ctx.full((16,), rank, dtype=torch.float32)
    assert new.data_ptr() == old.data_ptr()
    error = raised(ctx.free, old)
    another = ctx.full((16,), 7.0)
    assert new.eq(rank).all()
    ctx.free(new)
    ctx.free(another)
    ctx.barrier()
    return error


def test_a_context_refuses_what_was_freed_before(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(free_twice):
        assert kind == "ValueError"
        assert "freed before" in message
