"""Memory of other allocators: a second address of it on the heap, and heaps that are made of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from checking import fault, make_data
from families import make_problem
from ranks import Ranks, close_context, context, raised

from iris_bench.measure.environment import device_columns
from iris_core import iris
from iris_core.heap.allocator import ALIGNMENT
from overlap_taxonomy import get_variant

SIZE = 2 << 20


def of_an_engine(*shape: int) -> torch.Tensor:
    """Return a tensor in memory that another allocator made to be shared."""
    if context().is_interpreted():
        return torch.empty(shape).share_memory_()
    return symm_mem.empty(*shape, dtype=torch.float32, device=context().get_device())


def share(rank: int, world_size: int) -> None:
    ctx = context()
    base = of_an_engine(64, 32).fill_(rank)
    free = ctx.heap._addresses.free_bytes
    whole, part = ctx.as_symmetric(base, copy=False), ctx.as_symmetric(base[8:16])
    assert whole.shape == base.shape
    assert ctx.is_symmetric(whole)
    assert not ctx.is_symmetric(base)
    assert ctx.as_symmetric(whole) is whole
    assert "byte 4 of (8, 32) of torch.float32, of another allocator's" in str(ctx.heap.describe(part.data_ptr() + 4))
    ctx.barrier()
    peer = (rank + 1) % world_size
    ctx.peer_view(whole)[peer, 8, 3] = 100.0 + rank
    ctx.barrier()
    sender = 100.0 + (rank - 1) % world_size
    assert base[8, 3] == whole[8, 3] == part[0, 3] == sender
    base[8].fill_(rank)  # the engine's own writes are seen, too
    ctx.barrier()
    assert ctx.peer_view(part)[peer, 0].tolist() == [peer] * 32
    ctx.ccl.all_reduce(part)  # kernels read and write it
    ctx.barrier()
    assert base[8].tolist() == [sum(range(world_size))] * 32
    ctx.free(whole)
    assert raised(ctx.free, whole)[0] == "ValueError"
    again = ctx.as_symmetric(base, copy=False)  # where the first was
    assert again.data_ptr() == whole.data_ptr()
    ctx.free(again)
    ctx.free(part)
    assert ctx.heap._addresses.free_bytes == free
    ctx.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shared_memory_has_a_second_address_on_the_heap(ranks: Callable[[int], Ranks], world_size: int) -> None:
    ranks(world_size).call(share)


def copy(rank: int, world_size: int) -> list[tuple[str, str]]:
    ctx = context()
    used = ctx.heap.allocator.used_bytes
    private = torch.full((7,), float(rank))
    mixed = private.share_memory_() if rank else private.clone()
    apart = torch.full((16,), float(rank)).share_memory_()[2 * rank :][:8]  # not alike on all ranks
    other = torch.zeros(4096 * (rank + 1)).share_memory_()[:8]
    strided = torch.zeros(8, 8).share_memory_().t()
    negated = torch._neg_view(torch.ones(8).share_memory_())
    errors = []
    for tensor in (torch.zeros(4), mixed, apart, other, strided, negated):
        errors.append(raised(ctx.as_symmetric, tensor, copy=False))
        copied = ctx.as_symmetric(tensor)
        torch.testing.assert_close(copied, tensor, rtol=0, atol=0)
        ctx.free(copied)
    shared = torch.zeros(4).share_memory_()
    copied = ctx.as_symmetric(shared, copy=True)
    copied.fill_(1)
    assert shared.tolist() == [0] * 4
    ctx.free(copied)
    assert ctx.heap.allocator.used_bytes == used
    ctx.barrier()
    return errors


@pytest.mark.parametrize("device", ["cpu"])
def test_what_cannot_be_shared_is_copied_or_refused(ranks: Callable[[int], Ranks]) -> None:
    for rank, errors in enumerate(ranks(2).call(copy)):
        kinds, messages = zip(*errors, strict=True)
        assert kinds == ("ValueError",) * 6
        assert "memory of this process alone" in messages[0]
        assert "memory of this process alone" in messages[1]  # of rank 0, and known to rank 1
        assert ("rank 0 failed" in messages[1]) == (rank == 1)
        assert "rank 1: ['a file descriptor', 8, [64]]" in messages[2]
        assert "must be the same on all ranks" in messages[3]
        assert "contiguous" in messages[4]


class Engine:
    """An allocator that another library could have: memory that processes share, not at its start."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []
        self.asked: list[int] = []

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        self.asked.append(size)
        self.held.append(torch.empty(size + 48, dtype=torch.uint8).share_memory_()[48:])
        return self.held[-1]

    def free(self, memory: torch.Tensor) -> None:
        self.held[:] = [one for one in self.held if one is not memory]


def provide(rank: int, world_size: int) -> None:
    close_context()
    engine = Engine()
    with iris(SIZE, provider=engine) as ctx:
        ctx.grow(SIZE)
        assert len(engine.held) == 2
        assert ctx.provider == "Engine"
        assert device_columns(ctx)["device_name"].endswith(", heap of Engine")  # of rows that are measured with it
        assert 2 * (SIZE - ALIGNMENT) <= ctx.heap.allocator.capacity < 2 * SIZE
        buffer = ctx.full((SIZE - 4096,), rank, dtype=torch.uint8)
        assert any(buffer[-64:].eq(rank).all() and held.eq(rank).sum() >= SIZE - 4096 for held in engine.held)
        ctx.barrier()
        assert ctx.peer_view(buffer)[:, 5].tolist() == list(range(world_size))
        ctx.barrier()
        ctx.free(buffer)
    assert not engine.held
    assert raised(iris, SIZE, provider="another")[0] == "ValueError"
    with mock.patch.dict(os.environ, {"IRIS_PROVIDER": "yet another"}):
        assert "'yet another'" in raised(iris, SIZE)[1]
    engine.allocate = lambda size, device: torch.empty(size, dtype=torch.uint8)  # type: ignore[method-assign]
    kind, message = raised(iris, SIZE, provider="nvshmem")
    assert kind == "ImportError"
    assert "pip install nvshmem4py-cu12" in message
    kind, message = raised(iris, SIZE, provider=engine)
    assert kind == "ValueError"
    assert "memory of this process alone" in message
    assert raised(iris, SIZE, provider=engine if rank else None)[0] == "ValueError"


@pytest.mark.parametrize("device", ["cpu"])
def test_a_heap_is_made_of_a_providers_memory(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(provide)


def fake_torch(engine: Engine) -> None:
    symm_mem.empty = lambda *size, dtype, device: engine.allocate(*size, device)  # type: ignore[assignment]


def fake_nvshmem(engine: Engine) -> None:
    """Be ``nvshmem.core``, as far as the heap needs it: names and arguments are nvshmem4py 0.4's."""
    core: Any = ModuleType("nvshmem.core")

    def tensor(shape: tuple[int], dtype: torch.dtype = torch.float32, release: bool = False) -> torch.Tensor:
        assert dtype == torch.uint8
        return engine.allocate(*shape, torch.device("cpu"))

    core.tensor, core.free_tensor = tensor, engine.free
    package: Any = ModuleType("nvshmem")
    package.core = core
    sys.modules |= {"nvshmem": package, "nvshmem.core": core}


def multiply(rank: int, world_size: int, family: str, variant: str, provider: Any) -> tuple[list[str], torch.Tensor]:
    close_context()
    sizes = (512, 512, 512) if variant.endswith(":sm90") else (70, 264, 64)
    problem = make_problem(family, *sizes, world_size, torch.bfloat16)
    with iris(256 << 20 if torch.cuda.is_available() else 16 << 20, provider=provider) as ctx:
        operator = get_variant(family, variant).build(ctx, problem)
        data = make_data(family, problem, rank, seed=1, device=ctx.get_device(), layout="nk")
        faults, output = [], torch.empty(0)
        for _ in range(3):
            output = operator.as_matrix(operator(data.a, data.b)).clone()
            faults += filter(None, [fault(output, data, torch.bfloat16)])
        operator.close()
    return faults, output


def compare_providers(rank: int, world_size: int, family: str, variant: str) -> None:
    engine, providers = Engine(), ["torch_symmetric_memory"]
    if not torch.cuda.is_available():
        fake_torch(engine)
        fake_nvshmem(engine)
        providers.append("nvshmem")
    faults, expected = multiply(rank, world_size, family, variant, None)
    assert not faults
    assert not engine.asked
    for count, provider in enumerate(providers, start=1):
        faults, output = multiply(rank, world_size, family, variant, provider)
        assert not faults
        assert torch.equal(output, expected)
        assert torch.cuda.is_available() or len(engine.asked) == count


VARIANTS = [
    ("gemm_all_scatter", "workgroup_specialized:portable"),
    ("gemm_all_scatter", "copy_engine:portable"),
    ("all_gather_gemm", "workgroup_specialized:portable"),
    ("gemm_reduce_scatter", "fused_sequential:portable"),
    ("gemm_all_reduce", "fused_sequential:portable:stream_k"),
]


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_operators_give_the_same_on_providers_memory(ranks: Callable[[int], Ranks], family: str, variant: str) -> None:
    of = ranks(2)
    try:
        of.call(compare_providers, family, variant)
    finally:
        of.end()  # where torch's and NVSHMEM's names are replaced


HOPPERS = [
    ("gemm_all_scatter", "warp_specialized:sm90"),
    ("all_gather_gemm", "workgroup_specialized:sm90"),
    ("gemm_reduce_scatter", "warp_specialized:sm90"),
    ("gemm_all_reduce", "warp_specialized:sm90"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize(("family", "variant"), HOPPERS)
def test_descriptors_reach_the_peers_in_providers_memory(
    ranks: Callable[[int], Ranks], family: str, variant: str
) -> None:
    """A tensor descriptor covers all ranks' copies, which a provider has anywhere, and the window a stride apart."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of sm_90")
    ranks(2).call(compare_providers, family, variant)
