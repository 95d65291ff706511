"""Partitioned tensors: who holds what, global tiles to and from their owners, and what cannot be partitioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from compiling import TARGETS, Case, StubContext, compile_kernel
from ranks import Ranks, context

import iris_core
from iris_core import x
from iris_core.checker import check

SHAPES = [(8, 16), (5, 7), (1, 3), (17, 2)]
DIMS: list[Any] = [0, 1, (0, 1), (1, 0)]


@triton.jit
def shift_kernel(src, dst, context_tensor, MINE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store 2 * src + rank / 100 to dst, tile by tile: the tiles that this rank owns, or every world_size-th."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    source, target = x.make_partitioned_view(src), x.make_partitioned_view(dst)
    tiles_n = tl.cdiv(target.N, BLOCK_N)
    for number in range(tl.program_id(0), tl.cdiv(target.M, BLOCK_M) * tiles_n, tl.num_programs(0)):
        tile = x.TileView(number // tiles_n, number % tiles_n, BLOCK_M, BLOCK_N)
        doer = target.owner(tile) if MINE else number % ctx.world_size
        if doer == ctx.rank:
            target.store(tile, 2 * source.load(tile, ctx) + ctx.rank * 0.01, ctx)


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def expected(shape: tuple[int, int], doer: Callable[[int, int, int], int]) -> torch.Tensor:
    """What the kernel gives with tiles of 4 × 4, of which `doer` says who stores it."""
    result = 2 * values(shape)
    tiles_n = -(-shape[1] // 4)
    for row in range(shape[0]):
        for column in range(shape[1]):
            number = row // 4 * tiles_n + column // 4
            result[row, column] += 0.01 * doer(number, row // 4 * 4, column // 4 * 4)
    return result


def shift(rank: int, world_size: int, shape: tuple[int, int], src_dims: Any, dst_dims: Any, mine: bool) -> None:
    ctx = context()
    device = ctx.get_device()
    src = x.partition(ctx, values(shape).to(device), src_dims)
    dst = x.partition(ctx, shape, dst_dims)
    ctx.barrier()
    shift_kernel[(2,)](src.argument, dst.argument, ctx.get_device_context(), mine, 4, 4)
    ctx.barrier()
    block_m, block_n = dst.buffer.shape

    def owner(number: int, row: int, column: int) -> int:
        return row // block_m * dst.grid[1] + column // block_n

    def by_turns(number: int, row: int, column: int) -> int:
        return number % world_size

    rounding = 2 * torch.finfo(torch.float32).eps  # of the product, and of the sum
    result = expected(shape, owner if mine else by_turns)
    torch.testing.assert_close(dst.whole().cpu(), result, rtol=rounding, atol=0)
    assert torch.equal(src.whole().cpu(), values(shape))
    ctx.barrier()
    ctx.free(src.buffer)
    ctx.free(dst.buffer)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_global_tiles_go_to_their_owners(ranks: Callable[[int], Ranks], world_size: int) -> None:
    for number, shape in enumerate(SHAPES):
        for src_dims, dst_dims in zip(DIMS, DIMS[number % 4 :] + DIMS[: number % 4], strict=True):
            ranks(world_size).call(shift, shape, src_dims, dst_dims, number % 2 == 0)


def hold(rank: int, world_size: int, given: Any, dims: Any, grid: Any) -> tuple[Any, Any, Any]:
    ctx = context()
    parts = x.partition(ctx, given, dims, grid=grid)
    found = parts.grid, tuple(parts.buffer.shape), parts.local.tolist()
    ctx.free(parts.buffer)
    return found


@pytest.mark.parametrize("device", ["cpu"])
def test_ranks_hold_the_chunks_of_torch(ranks: Callable[[int], Ranks]) -> None:
    matrix, vector = values((5, 7)), values((5,))
    by_rows = ranks(4).call(hold, matrix, 0, None)
    assert {one[:2] for one in by_rows} == {((4, 1), (2, 7))}
    assert [one[2] for one in by_rows] == [*(part.tolist() for part in matrix.chunk(4)), []]
    assert [one[2] for one in ranks(4).call(hold, vector, -1, None)][:3] == [p.tolist() for p in vector.chunk(4)]
    in_grid = ranks(4).call(hold, matrix, (0, 1), None)
    assert in_grid[0][:2] == ((2, 2), (3, 4))
    assert [one[2] for one in in_grid] == [p.tolist() for rows in matrix.chunk(2) for p in rows.chunk(2, dim=1)]
    assert ranks(4).call(hold, matrix, (1, 0), (4, 1))[3][:2] == ((1, 4), (5, 2))


def misuse(rank: int, world_size: int, given: Any, dims: Any, grid: Any) -> str:
    with pytest.raises(ValueError, match=r" takes | can be ") as raised:
        x.partition(context(), given, dims, grid=grid)
    return str(raised.value)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("given", "dims", "grid", "message"),
    [
        ((2, 3, 4), 0, None, "a matrix or a vector"),
        ((2, 0), 0, None, "a matrix or a vector"),
        ((2, 3), 2, None, "dims is 2"),
        ((2, 3), (0, -2), None, "different dimensions"),
        ((2, 3), (), None, "one or more"),
        ((2, 3), 0, (2, 1), "1 numbers whose product is 2"),
        ((2, 3), (0, 1), (2, 2), "product is 2"),
    ],
)
def test_what_cannot_be_partitioned_says_so(
    ranks: Callable[[int], Ranks], given: Any, dims: Any, grid: Any, message: str
) -> None:
    assert all(message in said for said in ranks(2).call(misuse, given, dims, grid))


def program(rank: int, world_size: int, with_barrier: bool) -> None:
    with iris_core.iris(1 << 20) as ctx:
        src = x.partition(ctx, values((5, 7)), 0)
        dst = x.partition(ctx, (5, 7), (0, 1))
        ctx.barrier()
        shift_kernel[(2,)](src.argument, dst.argument, ctx.get_device_context(), False, 4, 4)
        if with_barrier:
            ctx.barrier()
        dst.whole()
        ctx.barrier()


def test_stores_are_followed_by_the_race_checker() -> None:
    report = check(program, 3, args=(True,), schedules=2)
    assert report.ok, report
    assert check(program, 3, args=(False,), schedules=2).races


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942", "gfx950"])
def test_tiles_are_moved_16_bytes_at_a_time(target: str) -> None:
    ctx = StubContext(Case("none", target))
    argument = (ctx.zeros(1 << 22, dtype=torch.bfloat16), 1024, 1024, 256, 1024, 1)
    context_tensor = ctx.zeros(64, dtype=torch.int64)
    given = {"src": argument, "dst": argument, "context_tensor": context_tensor}
    kernel = compile_kernel(shift_kernel, given | {"MINE": True, "BLOCK_M": 64, "BLOCK_N": 64}, target)
    assert kernel.stores_by_file().get("partitioned_view.py", {}).keys() == {16}
    assert kernel.count(r"ld\.global\.cg\.v4\.b32" if TARGETS[target].is_nvidia else r"_load_dwordx4")
    assert kernel.scratch_bytes == 0
