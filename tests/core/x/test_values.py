"""Collectives of values in registers: against their definitions, and under the race checker."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context

import iris_core
from iris_core import Context, x
from iris_core.checker import check
from iris_core.x import epochs

CALLS = 5
ROWS, COLUMNS = 8, 4
COMBINE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


@triton.jit(do_not_specialize=["rank"])
def values_kernel(
    inputs_ptr, outputs_ptr, workspace_ptr, flags_ptr, rank, heap_bases, watchdog_ptr, WORLD_SIZE: tl.constexpr,
    CALLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr, AXIS: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Combine one value after the other, with nothing between; an axis of -1 stands for all-reduce."""
    ctx = iris_core.DeviceContext(rank, WORLD_SIZE, heap_bases, watchdog_ptr)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    for call in range(CALLS):
        value = tl.load(inputs_ptr + call * ROWS * COLUMNS + rows * COLUMNS + columns)
        epoch = None if COUNTED else call + 1
        to_ptr = outputs_ptr + call * ROWS * COLUMNS
        if AXIS == -1:
            result = x.all_reduce_value(value, OP, ctx, workspace_ptr, flags_ptr, epoch)
            tl.store(to_ptr + rows * COLUMNS + columns, result)
        elif AXIS == 0:
            result = x.reduce_scatter_value(value, OP, 0, ctx, workspace_ptr, flags_ptr, epoch)
            tl.store(to_ptr + tl.arange(0, ROWS // WORLD_SIZE)[:, None] * COLUMNS + columns, result)
        else:
            result = x.reduce_scatter_value(value, OP, 1, ctx, workspace_ptr, flags_ptr, epoch)
            tl.store(to_ptr + rows * COLUMNS + tl.arange(0, COLUMNS // WORLD_SIZE)[None, :], result)


@triton.jit(do_not_specialize=["rank"])
def line_kernel(
    input_ptr, output_ptr, workspace_ptr, flags_ptr, rank, heap_bases, watchdog_ptr, WORLD_SIZE: tl.constexpr,
    SIZE: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """The same of a block of one dimension."""
    ctx = iris_core.DeviceContext(rank, WORLD_SIZE, heap_bases, watchdog_ptr)
    value = tl.load(input_ptr + tl.arange(0, SIZE))
    if SCATTER:
        result = x.reduce_scatter_value(value, "sum", 0, ctx, workspace_ptr, flags_ptr)
        tl.store(output_ptr + tl.arange(0, SIZE // WORLD_SIZE), result)
    else:
        result = x.all_reduce_value(value, "sum", ctx, workspace_ptr, flags_ptr)
        tl.store(output_ptr + tl.arange(0, SIZE), result)


def data_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-20, 20, (CALLS, ROWS, COLUMNS), generator=generator).to(dtype)


def combine(ctx: Context, op: str, axis: int, dtype: torch.dtype, counted: bool) -> None:
    rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
    inputs, outputs = ctx.zeros(CALLS, ROWS, COLUMNS, dtype=dtype), ctx.zeros(CALLS, ROWS, COLUMNS, dtype=dtype)
    workspace = ctx.zeros(2, world_size, ROWS, COLUMNS, dtype=dtype)
    flags = ctx.zeros(world_size + 1, dtype=torch.int64)
    inputs.copy_(data_of(rank, dtype))
    ctx.barrier()
    for _ in range(2 if counted else 1):  # launches; no epoch of the caller comes twice
        values_kernel[(1,)](
            inputs, outputs, workspace, flags, rank, ctx.get_heap_bases(), ctx.get_watchdog(), world_size, CALLS, ROWS,
            COLUMNS, op, axis, counted,
        )  # fmt: skip
    expected = COMBINE[op](torch.stack([data_of(peer, dtype).double() for peer in range(world_size)]), 0)
    if axis >= 0:
        expected = expected.chunk(world_size, axis + 1)[rank]
    found = outputs.cpu().double()
    assert torch.equal(found[:, : expected.shape[1], : expected.shape[2]], expected)
    ctx.barrier()
    for buffer in (inputs, outputs, workspace, flags):
        ctx.free(buffer)
    ctx.barrier()


def on_ranks(rank: int, world_size: int, op: str, axis: int, dtype: torch.dtype, counted: bool) -> None:
    combine(context(), op, axis, dtype, counted)


@pytest.mark.parametrize("op", COMBINE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce(ranks: Callable[[int], Ranks], op: str, dtype: torch.dtype, world_size: int) -> None:
    ranks(world_size).call(on_ranks, op, -1, dtype, dtype != torch.bfloat16)


@pytest.mark.parametrize("op", COMBINE)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_reduce_scatter(ranks: Callable[[int], Ranks], op: str, axis: int, world_size: int) -> None:
    ranks(world_size).call(on_ranks, op, axis, torch.float16, True)


def combine_line(rank: int, world_size: int, scatter: bool) -> list[float]:
    ctx = context()
    source, output = ctx.zeros(16), ctx.zeros(16)
    source.copy_(torch.arange(16) + 100 * rank)
    workspace, flags = ctx.zeros(2, world_size, 16), ctx.zeros(world_size + 1, dtype=torch.int64)
    ctx.barrier()
    line_kernel[(1,)](
        source, output, workspace, flags, rank, ctx.get_heap_bases(), ctx.get_watchdog(), world_size, 16, scatter
    )
    result = output.tolist()
    ctx.barrier()
    for buffer in (source, output, workspace, flags):
        ctx.free(buffer)
    ctx.barrier()
    return result


def test_blocks_of_one_dimension(ranks: Callable[[int], Ranks]) -> None:
    sums = [2.0 * index + 100 for index in range(16)]
    assert ranks(2).call(combine_line, False) == [sums, sums]
    assert ranks(2).call(combine_line, True) == [sums[:8] + [0.0] * 8, sums[8:] + [0.0] * 8]


def sum_apart(rank: int, world_size: int, values: list[float]) -> float:
    ctx = context()
    source, output = ctx.full((16,), values[rank], dtype=torch.bfloat16), ctx.zeros(16, dtype=torch.bfloat16)
    workspace, flags = ctx.zeros(2, world_size, 16, dtype=torch.bfloat16), ctx.zeros(world_size + 1, dtype=torch.int64)
    ctx.barrier()
    line_kernel[(1,)](
        source, output, workspace, flags, rank, ctx.get_heap_bases(), ctx.get_watchdog(), world_size, 16, False
    )
    result = output[0].item()
    ctx.barrier()
    for buffer in (source, output, workspace, flags):
        ctx.free(buffer)
    ctx.barrier()
    return result


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([256.0, 1.0, 1.0], 258.0),  # 256, if partial sums were rounded
        ([2.0**24, 1.0, -(2.0**24)], 0.0),  # 1, in an order that adds the large ones first
        ([1.0, 2.0**24, -(2.0**24)], 0.0),
    ],
)
def test_sums_are_fp32_in_the_order_of_ranks(
    ranks: Callable[[int], Ranks], values: list[float], expected: float
) -> None:
    assert ranks(3).call(sum_apart, values) == [expected] * 3


def program(rank: int, world_size: int, axis: int) -> None:
    with iris_core.iris(1 << 21) as ctx:
        combine(ctx, "sum", axis, torch.float32, True)


@pytest.mark.parametrize(("axis", "world_size"), [(-1, 2), (-1, 3), (0, 2), (1, 2)])
def test_no_race(axis: int, world_size: int) -> None:
    report = check(program, world_size, args=(axis,), schedules=4)
    assert report.ok, report


@triton.jit
def no_wait(flags_ptr, expected, rank, world_size, watchdog_ptr):
    tl.debug_barrier()


@triton.jit
def always_one(count_ptr, epoch):
    """`count_call` for one half of the workspace alone: numbers grow by two."""
    tl.debug_barrier()
    number = tl.load(count_ptr) + 2
    tl.debug_barrier()
    tl.store(count_ptr, number)
    return number


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_missing_wait_is_a_race(axis: int) -> None:
    with mock.patch.object(epochs, "wait_peers", no_wait):
        assert check(program, 2, args=(axis,), schedules=4).races


@pytest.mark.parametrize("axis", [-1, 0])
def test_one_half_of_the_workspace_is_too_little(axis: int) -> None:
    with mock.patch.object(epochs, "count_call", always_one):
        assert check(program, 2, args=(axis,), schedules=4).races
