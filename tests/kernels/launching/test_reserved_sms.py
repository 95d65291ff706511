"""SMs that a context reserves: no grid of any variant takes one, and a configuration that would is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import compiling
import pytest
import torch
import torch.distributed as dist
from checking import fault, make_data
from compiling import TARGETS, Case, StubContext, recorded_launches
from families import FUSED, GPU_FUSED, make_problem, name
from ranks import Ranks, close_context, raised

from iris_core import iris
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.launch.channel import Channel
from iris_kernels.common.portable import operands
from iris_kernels.gemm_all_reduce import gemm_all_reduce
from overlap_taxonomy import Agent, Mainloop, Variant, get_variant

RESERVED = 12
TARGET = "sm_90"
FREE = TARGETS[TARGET].num_sms - RESERVED


def programs(variant: Variant, m: int, reserve_sms: int) -> int:
    """Return how many programs of a call run at once on a GPU that is not there.

    Those of operands' copies, which wait for nobody, do not count, nor do programs that signal for a copy engine.
    """
    found, launch = [], Channel.launch

    def record(self: Channel, kernel: Any, num_programs: int, *others: Any) -> None:
        if kernel is not operands.copy_operands_kernel:
            found.append(num_programs)
        launch(self, kernel, num_programs, *others)

    case = Case(variant.name, TARGET, rank=0, family=variant.family, world_size=4)
    problem = make_problem(variant.family, m, 16384, 8192, 4, torch.bfloat16)
    with (
        mock.patch.object(hopper, "machine_reason", return_value=None),
        mock.patch.object(torch, "zeros", torch.empty),  # gigabytes that nothing will read
        mock.patch.object(Channel, "launch", record),
        recorded_launches(),
    ):
        ctx = StubContext(case, 8 << 30, reserve_sms)
        operator: Any = get_variant(variant.family, variant.name).build(ctx, problem)  # type: ignore[arg-type]
        assert operator.config.num_sms <= ctx.get_cu_count()
        operator(*(torch.empty(shape(0), dtype=torch.bfloat16) for shape in (problem.a_shape, problem.b_shape)))
    if variant.agent is Agent.COMM_KERNEL:  # it runs beside the one that multiplies
        return max(found[0] + found[1], *found[2:], 0)
    return max(found)


@pytest.mark.parametrize("m", [64, 8192])
@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_no_grid_takes_a_reserved_sm(variant: Variant, m: int) -> None:
    assert programs(variant, m, RESERVED) <= FREE
    is_all_others = variant.mainloop is Mainloop.LIBRARY and variant.agent is Agent.COPY_ENGINES  # no grid of ours
    if m == 8192 and not is_all_others:
        assert programs(variant, m, 0) > FREE  # what it would take


@pytest.mark.parametrize("target", ["cpu", TARGET])
def test_a_configuration_that_takes_reserved_sms_is_refused(target: str) -> None:
    case = Case("fused_sequential:portable", TARGET, rank=0)
    ctx = StubContext(case, reserve_sms=RESERVED)
    variant, problem = get_variant(case.family, case.variant), compiling.make_problem(case)
    with mock.patch.object(ctx, "get_arch", return_value=target), recorded_launches():
        operator: Any = variant.build(ctx, problem)  # type: ignore[arg-type]
        variant.build(ctx, problem, replace(operator.config, num_sms=FREE))  # type: ignore[arg-type]
        reason = rf"room for {FREE} at once, beside the {RESERVED} that reserve_sms keeps free: num_sms={FREE}"
        with pytest.raises(ValueError, match=reason):
            variant.build(ctx, problem, replace(operator.config, num_sms=FREE + 1))  # type: ignore[arg-type]


def reserve(rank: int, world_size: int) -> tuple[list[str], int, list[Any]]:
    """Call a variant of each pattern on the fewest SMs; return what is wrong, and a configuration's error."""
    close_context()
    wrong = []
    with iris(16 << 20, reserve_sms=2) as ctx:
        free = ctx.get_cu_count()
        for variant in {(one.pattern, one.schedule): one for one in FUSED}.values():
            problem = make_problem(variant.family, 40, 70, 36, world_size, torch.float32)
            if variant.unsupported_reason(problem, None):  # kernels of GPUs
                continue
            operator = variant.build(ctx, problem)
            data = make_data(variant.family, problem, rank, 0, ctx.get_device())
            found = fault(operator.as_matrix(operator(data.a, data.b)), data, problem.dtype)
            if found or operator.config.num_sms > free:
                wrong.append(f"{operator} with {operator.config}: {found}")
            operator.close()
        config = get_variant("gemm_all_reduce", "auto").build(ctx, problem_of(world_size)).config
        a, b = torch.ones(8, 4), torch.ones(4, 8)
        told = raised(
            gemm_all_reduce, ctx, a, b, variant="workgroup_specialized:portable", config=replace(config, num_sms=3)
        )
    return wrong, free, told


def problem_of(world_size: int) -> Any:
    return make_problem("gemm_all_reduce", 8, 8, 4 * world_size, world_size, torch.float32)


@pytest.mark.parametrize("device", ["cpu"])
def test_patterns_are_right_on_as_few_sms_as_there_can_be(ranks: Callable[[int], Ranks]) -> None:
    for wrong, free, (kind, message) in ranks(2).call(reserve):
        assert (wrong, free, kind) == ([], 2, "ValueError")
        assert "beside the 2 that reserve_sms keeps free" in message


def ask(rank: int, world_size: int) -> list[tuple[str, str]]:
    close_context()
    return [raised(iris, 1 << 20, reserve_sms=asked) for asked in (-1, 3, 0.5, rank)]


@pytest.mark.parametrize("device", ["cpu"])
def test_reservations_that_make_no_sense_are_refused(ranks: Callable[[int], Ranks]) -> None:
    for *nonsense, differing in ranks(2).call(ask):
        for asked, (kind, message) in zip((-1, 3, 0.5), nonsense, strict=True):
            assert kind == "ValueError"
            assert f"reserve_sms is {asked}; it takes 0 to 2 of the 4 SMs here" in message
        assert differing[0] == "ValueError"
        assert "'reserve_sms': 1" in differing[1]


ROUNDS, CALLS_A_ROUND = 200, 4
NCCL_SMS = 16
REDUCED = 1 << 24  # elements, which NCCL takes as long for as a round's calls


def run_beside_nccl(rank: int, world_size: int) -> tuple[list[str], int]:
    """Call variants in turn on one stream, and all-reduce on another, unordered; return what is wrong of each."""
    close_context()
    with iris(1 << 30, timeout_s=30, reserve_sms=NCCL_SMS) as ctx:
        own = ctx.process_group()
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = NCCL_SMS
        group = dist.new_group(dist.get_process_group_ranks(own), backend="nccl", pg_options=options)
        device = ctx.get_device()
        x, off = torch.zeros(REDUCED, device=device), torch.zeros(ROUNDS, dtype=torch.int64, device=device)
        dist.all_reduce(x, group=group)  # its first call makes connections, and waits
        made = []
        for variant in GPU_FUSED:
            problem = make_problem(variant.family, 1024, 1024, 1024, world_size, torch.bfloat16)
            if not variant.unsupported_reason(problem, None):
                data = [make_data(variant.family, problem, rank, seed, device) for seed in range(2)]
                operator = variant.build(ctx, problem)
                operator(data[0].a, data[0].b)  # compiled, and loaded, before anything waits for anything
                made.append((operator, data))
        ctx.barrier()
        beside, outputs = torch.cuda.Stream(device), []
        for number in range(ROUNDS):
            with torch.cuda.stream(beside):
                x.fill_(number + rank)
                dist.all_reduce(x, group=group)
                off[number] = (x != world_size * number + sum(range(world_size))).sum()
            for call in range(number * CALLS_A_ROUND, (number + 1) * CALLS_A_ROUND):
                operator, data = made[call % len(made)]
                one = data[call // len(made) % len(data)]
                outputs.append((operator, one, operator.as_matrix(operator(one.a, one.b)).clone()))
        ctx.barrier()
        wrong = [
            f"{operator}: {said}" for operator, one, output in outputs if (said := fault(output, one, output.dtype))
        ]
        reduced_wrong = int(off.sum())
        dist.destroy_process_group(group)
    return wrong, reduced_wrong


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.usefixtures("gpu_a_rank")
def test_kernels_that_wait_leave_nccl_its_sms(ranks: Callable[[int], Ranks]) -> None:
    """Without a reservation a rank's calls may fill its GPU, and wait for a peer whose stream waits for NCCL here.

    A wait of theirs that passes its limit is an error, so the test ends.
    """
    assert ranks(2).call(run_beside_nccl) == [([], 0)] * 2


def run_two_contexts(rank: int, world_size: int) -> list[str]:
    """Call variants of two contexts in turn, each on a stream of its own, unordered; return what is wrong."""
    close_context()
    half = torch.cuda.get_device_properties(rank).multi_processor_count // 2
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(iris(1 << 30, timeout_s=30, reserve_sms=half))
        group = dist.new_group(dist.get_process_group_ranks(first.process_group()))
        contexts = [first, stack.enter_context(iris(1 << 30, timeout_s=30, reserve_sms=half, group=group))]
        device = contexts[0].get_device()
        data = {
            family: make_data(
                family, make_problem(family, 1024, 1024, 1024, world_size, torch.bfloat16), rank, 0, device
            )
            for family in {variant.family for variant in GPU_FUSED}
        }
        made: list[list[Any]] = [[], []]
        for variant in GPU_FUSED:
            problem = make_problem(variant.family, 1024, 1024, 1024, world_size, torch.bfloat16)
            for ctx, operators in zip(contexts, made, strict=True):
                if not variant.unsupported_reason(problem, None):
                    operators.append((variant.build(ctx, problem), data[variant.family]))
                    operators[-1][0](data[variant.family].a, data[variant.family].b)  # compiled and loaded
        for ctx in contexts:
            ctx.barrier()
        streams, outputs = [torch.cuda.Stream(device) for _ in contexts], []
        for number in range(ROUNDS):
            for index, (operators, stream_of_its_own) in enumerate(zip(made, streams, strict=True)):
                operator, one = operators[(number * (index + 1)) % len(operators)]  # pairs change from call to call
                with torch.cuda.stream(stream_of_its_own):
                    outputs.append((operator, one, operator.as_matrix(operator(one.a, one.b)).clone()))
        torch.cuda.synchronize()
        for ctx in contexts:
            ctx.barrier()
        return [
            f"{operator}: {said}" for operator, one, output in outputs if (said := fault(output, one, output.dtype))
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_two_contexts_share_the_gpus(ranks: Callable[[int], Ranks], world_size: int) -> None:
    """Each context leaves the other's kernels half of the SMs; ranks' streams may begin them in different orders."""
    assert ranks(world_size).call(run_two_contexts) == [[]] * world_size
