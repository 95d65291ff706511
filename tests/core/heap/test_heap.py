"""What the ranks see of each other's memory from the host: peer views, heap bases, broadcast, compared histories."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks, close_context, context, raised

from iris_core import iris


def view_peers(rank: int, world_size: int) -> None:
    ctx = context()
    mine = ctx.full((world_size, 5), rank, dtype=torch.int32)
    view = ctx.peer_view(mine)
    assert view.shape == (world_size, world_size, 5)
    ctx.barrier()
    for peer in range(world_size):
        assert (view[peer] == peer).all()
    ctx.barrier()
    view[(rank + 1) % world_size, rank] = 100 + rank  # a row of the next rank's
    ctx.barrier()
    left = (rank - 1) % world_size
    assert (mine[left] == 100 + left).all()
    assert (mine == rank).sum() == 5 * (world_size - 1)  # nothing else was written
    column = ctx.peer_view(mine[:, 2:4])
    assert column.shape == (world_size, world_size, 2)
    assert column.data_ptr() == view[0, 0, 2:].data_ptr()
    ctx.free(mine)
    ctx.barrier()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_peer_view_reads_and_writes_every_rank(ranks: Callable[[int], Ranks], world_size: int) -> None:
    ranks(world_size).call(view_peers)


def read_bases(rank: int, world_size: int) -> tuple[list[int], int, int]:
    ctx = context()
    mine = ctx.zeros(10)
    bases = ctx.get_heap_bases()
    assert bases.dtype == torch.uint64
    assert bases.device == ctx.get_device()
    offset = mine.data_ptr() - int(bases[rank])
    view = ctx.peer_view(mine)
    for peer in range(world_size):
        assert int(bases[peer]) + offset == view[peer].data_ptr()
    ctx.free(mine)
    ctx.barrier()
    return [int(base) for base in bases], offset, ctx.heap.stride


def test_heap_bases_are_a_stride_apart_and_offsets_alike(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(4).call(read_bases)
    assert len({offset for _, offset, _ in results}) == 1
    for bases, _, stride in results:
        assert bases == [bases[0] + rank * stride for rank in range(4)]
        assert stride % (2 << 20) == 0  # what the compiler is told about a translated address


def identify(rank: int, world_size: int) -> tuple[int, int, str]:
    ctx = context()
    assert ctx.get_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert ctx.get_cu_count() > 1
    assert ctx.get_device_id() == (ctx.get_device().index or 0)
    return ctx.get_rank(), ctx.get_num_ranks(), ctx.get_arch()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_context_knows_its_place(ranks: Callable[[int], Ranks], world_size: int, device: str) -> None:
    results = ranks(world_size).call(identify)
    assert [result[:2] for result in results] == [(rank, world_size) for rank in range(world_size)]
    assert (results[0][2] == "cpu") == (device == "cpu")


def broadcast(rank: int, world_size: int) -> None:
    ctx = context()
    before = ctx.heap.allocator.used_bytes
    for source in range(world_size):
        for tensor in (torch.arange(6.0).view(2, 3) + source, torch.tensor(source), torch.zeros(0, 4).bool()):
            given = tensor if rank == source else None
            got = ctx.broadcast(given, source)
            torch.testing.assert_close(got, tensor.to(ctx.get_device()), rtol=0, atol=0)
            assert not ctx.heap.contains(got)
        for value in (None, 3, "word", [1, {"a": 2.5}]):
            assert ctx.broadcast(value if rank == source else "mine", source) == value
    # The source's strides, dtype and place do not matter.
    strided = torch.arange(12, dtype=torch.int16).view(3, 4).t() if rank == 0 else None
    assert ctx.broadcast(strided, 0).tolist() == torch.arange(12).view(3, 4).t().tolist()
    assert raised(ctx.broadcast, 1, world_size)[0] == "ValueError"
    assert ctx.heap.allocator.used_bytes == before


@pytest.mark.parametrize("world_size", [1, 3])
def test_broadcast_gives_the_sources_value_to_all(ranks: Callable[[int], Ranks], world_size: int) -> None:
    ranks(world_size).call(broadcast)


def differ(rank: int, world_size: int, how: str) -> tuple[str, str]:
    close_context()
    ctx = iris(1 << 20)  # of its own: the heaps part
    first, second = ctx.zeros(4), ctx.zeros(8)
    ctx.barrier()
    if how == "shape":
        ctx.zeros(3 + rank)
    elif how == "one more" and rank == world_size - 1:
        ctx.ones(2)
    elif how == "order of frees":
        for buffer in (first, second) if rank else (second, first):
            ctx.free(buffer)
    error = raised(ctx.barrier)
    assert raised(ctx.close) == error
    return error


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("shape", ["call 1 differs", "rank 0: allocate (3,) of torch.float32", "rank 1: allocate (4,)"]),
        ("one more", ["call 1 differs", "rank 0: nothing", "rank 1: allocate (2,)"]),
        ("order of frees", ["call 1 differs", "free the allocation at offset"]),
    ],
)
@pytest.mark.parametrize("device", ["cpu"])
def test_different_allocations_are_named_on_every_rank(ranks: Callable[[int], Ranks], how: str, parts: Any) -> None:
    for kind, message in ranks(2).call(differ, how):
        assert kind == "AllocationMismatch"
        for part in parts:
            assert part in message


def reopen(rank: int, world_size: int) -> None:
    ctx = context()
    assert raised(iris, 1 << 20)[0] == "RuntimeError"  # one at a time
    close_context()
    for size in (1 << 20, 5 << 20):
        other = iris(size)
        assert size <= other.heap.stride
        values = other.full((7,), rank, dtype=torch.int64)
        other.barrier()
        assert other.peer_view(values)[:, 0].tolist() == list(range(world_size))
        other.close()
    assert context() is not ctx
    for mistake in ({"heap_size": 0}, {"heap_size": 1.5}, {"device": "tpu"}):
        close_context()
        kind, message = raised(iris, **mistake)
        assert kind == "ValueError"
        assert str(next(iter(mistake.values()))) in message
    context().barrier()


def test_a_context_can_be_closed_and_another_made(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(reopen)


def send_what_json_changes(rank: int, world_size: int) -> list[Any]:
    ctx = context()
    weight = torch.nn.Parameter(torch.full((2, 3), float(rank)), requires_grad=rank == 1)
    received = ctx.broadcast(weight, 1)
    return [ctx.broadcast({1: (2, 3)}, 0), received.tolist(), received.requires_grad]


@pytest.mark.parametrize("device", ["cpu"])
def test_a_broadcast_is_the_same_everywhere(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(send_what_json_changes) == [[{"1": [2, 3]}, [[1.0] * 3] * 2, False]] * 2


def free_what_is_watched(rank: int, world_size: int) -> tuple[list[int], int]:
    ctx = context()
    flags = ctx.zeros(8, dtype=torch.int64)
    before = len(ctx.watchdog.watched)
    for half in flags.view(2, 4):
        ctx.watchdog.watch(half, lambda word, rank: str(word))
    ctx.free(flags)
    data = ctx.full((8,), 7, dtype=torch.int64)
    assert data.data_ptr() == flags.data_ptr()
    left = len(ctx.watchdog.watched) - before
    ctx.reset()
    values = data.tolist()
    ctx.free(data)
    return values, left


@pytest.mark.parametrize("device", ["cpu"])
def test_what_is_freed_is_no_longer_watched_nor_zeroed(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(free_what_is_watched) == [([7] * 8, 0)] * 2


def use_as_any_other(rank: int, world_size: int) -> None:
    """What torch does to a tensor's whole storage concerns that tensor alone."""
    ctx = context()
    one, other = ctx.full((8, 4), rank, dtype=torch.float32), ctx.zeros(3)
    weight = torch.ones(8, 4, device=ctx.get_device(), requires_grad=True)
    product = weight * one  # keeps `one` for the gradient, and notes its version
    other.add_(1)
    product.sum().backward()
    assert weight.grad is not None
    assert (weight.grad == rank).all()
    saved = io.BytesIO()
    torch.save(one, saved)
    assert len(saved.getvalue()) < 1 << 14
    copied = copy.deepcopy(one)
    assert copied.untyped_storage().nbytes() == one.nbytes
    one.fill_(-1)
    assert (copied == rank).all()
    assert (other == 1).all()
    assert not ctx.empty(0, 5).numel()
    ctx.free(one)
    ctx.free(other)
    ctx.barrier()


def test_a_tensor_has_a_storage_of_its_own(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(use_as_any_other)


def broadcast_numpy(rank: int, world_size: int) -> None:
    ctx = context()
    for dtype in ("float32", "int64", "bool", "complex64"):
        for shape in ((3, 2), (), (0, 4)):
            array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            got = ctx.broadcast(array if rank == 1 else None, 1)
            assert isinstance(got, np.ndarray)
            assert (got.dtype, got.shape, got.tolist()) == (array.dtype, shape, array.tolist())
    assert ctx.broadcast(np.arange(6)[::2] if rank == 0 else None, 0).tolist() == [0, 2, 4]
    assert ctx.broadcast(np.float32(1.5) if rank == 0 else None, 0) == 1.5
    assert ctx.broadcast(np.int64(3) if rank == 1 else "mine", 1) == 3
    kind, message = raised(ctx.broadcast, np.array(["text"]) if rank == 0 else None, 0)
    assert (kind, "numpy.str_" in message) == ("TypeError", True), (kind, message)
    assert ctx.broadcast(rank, 1) == 1  # and the ranks go on


def test_broadcast_takes_arrays_and_numbers_of_numpys(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(broadcast_numpy)
