"""A context that sleeps has no memory behind its heap; woken, it goes on at the same addresses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checking import fault, make_data
from families import GPU_FUSED, make_problem, name
from ranks import Ranks, close_context, raised

from iris_core import Context, iris
from iris_core.checker import check
from iris_kernels.gemm_all_reduce import gemm_all_reduce
from overlap_taxonomy import Variant, get_variant, list_variants

FUSED = [(one.family, one.name) for one in list_variants() if one.has_kernels]
HEAP = 16 << 20
CALLS = 3
HEAP_ON_GPU = 1 << 30
LOOKS = 30  # at a GPU's free memory, at most


def call(operators: list[Any], rank: int, seed: int, device: torch.device) -> list[str]:
    """Call each operator with data of its own; return what is wrong."""
    wrong = []
    for operator in operators:
        for number in range(CALLS):
            data = make_data(operator.family, operator.problem, rank, seed + number, device)
            output = operator.as_matrix(operator(data.a, data.b))
            wrong += [f"{operator}, call {number}: {said}" for said in [fault(output, data, output.dtype)] if said]
    return wrong


def mapped_kb(window: torch.Tensor) -> int:
    """Return how much memory this process has behind the addresses of all ranks' heaps, without a GPU."""
    mappings = re.findall(
        r"^([0-9a-f]+)-[0-9a-f]+ .*iris_heap.*\n(?:.*\n)*?Rss: +(\d+)", Path("/proc/self/smaps").read_text(), re.M
    )
    found = [int(kb) for start, kb in mappings if 0 <= int(start, 16) - window.data_ptr() < window.numel()]
    assert found
    return sum(found)


def sleep_and_wake(rank: int, world_size: int) -> list[Any]:
    close_context()
    with iris(HEAP) as ctx:
        device = ctx.get_device()
        operators = []
        for family, variant in FUSED:
            problem = make_problem(family, 40, 70, 72, world_size, torch.bfloat16)
            if not get_variant(family, variant).unsupported_reason(problem, None):
                operators.append(get_variant(family, variant).build(ctx, problem, new_outputs=True))
        own, summed = ctx.ones(1000), torch.empty(50)
        ctx.grow(HEAP)
        grown = ctx.ones(HEAP // 8, dtype=torch.float64)  # more than there was before
        ctx.ccl.all_reduce(summed, torch.ones(50))
        ctx.device_barrier()
        wrong = call(operators, rank, 0, device)
        addresses, words = (ctx.heap.base, own.data_ptr(), grown.data_ptr()), ctx.watchdog.words.tolist()
        before = mapped_kb(ctx.heap.window)
        ctx.sleep()
        left = mapped_kb(ctx.heap.window)
        data = make_data(operators[0].family, operators[0].problem, rank, 0, device)
        uses: list[Any] = [
            (operators[0], data.a, data.b),
            (gemm_all_reduce, ctx, torch.ones(4, 4), torch.ones(4, 4)),
            (torch.ops.iris_overlap.gemm_all_reduce, torch.ones(4, 4), [torch.ones(4, 4)], 4, 4, 8, ctx.name),
            (ctx.ccl.all_reduce, summed, torch.ones(50)),
            (ctx.device_barrier,),
            (ctx.barrier,),
            (ctx.zeros, 4),
            (ctx.free, own),
            (ctx.peer_view, own),
            (ctx.get_device_context,),
            (ctx.reset,),
            (ctx.sleep,),
        ]
        errors = [raised(*use) for use in uses]
        ctx.wake()
        ctx.wake()  # which does nothing
        assert (ctx.heap.base, own.data_ptr(), grown.data_ptr()) == addresses
        assert ctx.watchdog.words.tolist() == words
        assert not own.any()
        assert not grown.any()
        assert not ctx.peer_view(grown)[:, -1].any()
        ctx.barrier()
        grown.fill_(rank)
        ctx.barrier()
        assert ctx.peer_view(grown)[:, -1].tolist() == list(range(world_size))
        wrong += call(operators, rank, 10, device)
        ctx.ccl.all_reduce(summed, torch.full((50,), 2.0))
        assert summed.eq(2 * world_size).all()
        ctx.device_barrier()
        ctx.sleep()
        ctx.wake()
        wrong += call(operators[:2], rank, 20, device)
        return [wrong, before, left, errors]


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_woken_context_goes_on(ranks: Callable[[int], Ranks], world_size: int) -> None:
    for wrong, before, left, errors in ranks(world_size).call(sleep_and_wake):
        assert not wrong
        assert before > 100
        assert left == 0
        assert {kind for kind, _ in errors} == {"RuntimeError"}
        assert all("this context is asleep" in message and "wake()" in message for _, message in errors), errors


def fail_to_wake(rank: int, world_size: int) -> list[Any]:
    """Wake where a rank has no memory, then where it has; then close a context that sleeps."""
    close_context()
    ctx = iris(HEAP)
    own = ctx.ones(4)
    ctx.sleep()
    mapping = ctx.backend.map_memory

    def refuse(control_plane: Any, offset: int, size: int) -> None:
        with control_plane.collective_section("map memory"):
            if rank == 1:
                raise RuntimeError("CUDA driver: out of memory")
            mapping(control_plane, offset, size)

    with mock.patch.object(ctx.backend, "map_memory", refuse):
        errors = [raised(ctx.wake), raised(ctx.barrier)]
    ctx.wake()
    is_right = bool(own.fill_(3).eq(3).all())
    ctx.sleep()
    ctx.close()
    errors += [raised(ctx.wake), raised(ctx.sleep)]
    return [errors, is_right]


@pytest.mark.parametrize("device", ["cpu"])
def test_a_context_that_cannot_be_woken_sleeps_on(ranks: Callable[[int], Ranks]) -> None:
    for rank, (errors, is_right) in enumerate(ranks(2).call(fail_to_wake)):
        parts = ["out of memory", "asleep", "closed", "closed"]
        assert all(part in message for part, (_, message) in zip(parts, errors, strict=True)), errors
        assert [kind for kind, _ in errors] == ["RuntimeError" if rank else "PeerError", *["RuntimeError"] * 3]
        assert is_right


class Shared:
    """An allocator of memory that processes can share."""

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8).share_memory_()

    def free(self, memory: torch.Tensor) -> None:
        pass


def sleep_with_memory_of_others(rank: int, world_size: int) -> list[Any]:
    close_context()
    with iris(HEAP) as ctx:
        shared = ctx.as_symmetric(torch.full((4, 8), 5.0).share_memory_(), copy=False)
        own = ctx.full((4,), 3.0)
        errors = [raised(ctx.sleep)]
        ctx.barrier()  # it is awake
        assert own.eq(3).all()
        assert shared.eq(5).all()
        ctx.free(shared)
        ctx.sleep()
        ctx.wake()
        assert not own.any()
        again = ctx.as_symmetric(torch.full((4, 8), 6.0).share_memory_(), copy=False)
        assert ctx.peer_view(again).eq(6).all()
        ctx.barrier()
    with iris(HEAP, provider=Shared()) as ctx:
        errors.append(raised(ctx.sleep))
        ctx.barrier()
    return errors


@pytest.mark.parametrize("device", ["cpu"])
def test_memory_of_others_keeps_a_context_awake(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).call(sleep_with_memory_of_others):
        assert [kind for kind, _ in errors] == ["RuntimeError"] * 2
        assert "(4, 8) of torch.float32" in errors[0][1]
        assert "free()" in errors[0][1]
        assert "Shared" in errors[1][1]
        assert "without provider=" in errors[1][1]


def sleep_under_the_checker(rank: int, world_size: int) -> None:
    with iris(1 << 20, "cpu") as ctx:
        own = ctx.ones(4)
        ctx.device_barrier()
        ctx.sleep()
        ctx.wake()
        assert not own.any()
        ctx.device_barrier()


def test_a_checked_program_may_sleep() -> None:
    report = check(sleep_under_the_checker, 2, schedules=2)
    assert report.ok, report


def freed_asleep(ctx: Context) -> int:
    """Sleep and wake; return how much more of this rank's GPU is free meanwhile, in bytes.

    Other processes take and free memory of the GPU at the same time: it sleeps again until all ranks have seen most of
    their heap free.
    """
    freed = 0
    for _ in range(LOOKS):
        before = torch.cuda.mem_get_info(ctx.get_device())[0]
        ctx.sleep()
        assert not ctx.backend._segments  # this process has nothing mapped
        freed = max(freed, torch.cuda.mem_get_info(ctx.get_device())[0] - before)
        ctx.wake()
        if min(ctx.control_plane.all_gather(freed, "free the heaps")) >= 0.9 * HEAP_ON_GPU:
            break
    return freed


def replay_after_sleep(rank: int, world_size: int, family: str, variant: str) -> list[Any]:
    """Capture calls, sleep, wake, and replay them with other data; return what is wrong, and free memory in between."""
    close_context()
    with iris(HEAP_ON_GPU) as ctx:
        device = ctx.get_device()
        problem = make_problem(family, 1024, 1024, 1024, world_size, torch.bfloat16)
        operator = get_variant(family, variant).build(ctx, problem)
        data = [make_data(family, problem, rank, seed, device) for seed in range(4)]
        a, b = data[0].a.clone(), data[0].b.t().clone().t()
        for _ in range(3):
            operator(a, b)
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operator(a, b)
            output = operator.as_matrix(operator(a, b))
        wrong, freed = [], []
        for number in range(12):
            one = data[number % len(data)]
            if number % 4 == 3:
                freed.append(freed_asleep(ctx))
            a.copy_(one.a)
            b.copy_(one.b)
            if number % 3:
                graph.replay()
                found = output
            else:
                found = operator.as_matrix(operator(a, b))
            said = fault(found.clone(), one, torch.bfloat16)
            wrong += [f"step {number}: {said}"] if said else []
        ctx.barrier()
        operator.close()
    return [wrong, freed]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("variant", GPU_FUSED, ids=name)
def test_captured_calls_are_replayed_after_sleep(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    for wrong, freed in ranks(2).call(replay_after_sleep, variant.family, variant.name):
        assert not wrong
        assert min(freed) >= 0.9 * HEAP_ON_GPU
