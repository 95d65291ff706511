"""Tile-level collectives against their definitions: 1 to 3 ranks, dtypes, sizes that no tile divides, called again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context

from iris_core import x

BLOCK_M, BLOCK_N = 8, 16
SHAPES = [(16, 32), (13, 21)]  # tiles divide the first, and nothing divides the second
CALLS = 3
OUTSIDE = 99  # what is beyond an output's columns and must stay


@triton.jit(do_not_specialize=["rank", "epoch"])
def all_reduce_kernel(
    src_ptr, dst_ptr, flags_ptr, M, N, stride_src, stride_dst, rank, epoch, heap_bases, watchdog_ptr,
    WORLD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COUNTED: tl.constexpr,
    ALGORITHM: tl.constexpr,
):  # fmt: skip
    ctx = x.RankContext(rank, WORLD_SIZE, heap_bases, watchdog_ptr)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = x.TileView(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, BLOCK_M, BLOCK_N)
    src, dst = x.make_tensor_view(src_ptr, M, N, stride_src, 1), x.make_tensor_view(dst_ptr, M, N, stride_dst, 1)
    if COUNTED:
        ALGORITHM(tile, src, dst, ctx, flags_ptr)
    else:
        ALGORITHM(tile, src, dst, ctx, flags_ptr, epoch)


@triton.jit(do_not_specialize=["rank"])
def all_gather_kernel(
    src_ptr, dst_ptr, flags_ptr, M, N, stride_src, stride_dst, rank, heap_bases, watchdog_ptr,
    WORLD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    ctx = x.RankContext(rank, WORLD_SIZE, heap_bases, watchdog_ptr)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = x.TileView(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, BLOCK_M, BLOCK_N)
    rows, columns = (M * WORLD_SIZE, N) if DIM == 0 else (M, N * WORLD_SIZE)
    src = x.make_tensor_view(src_ptr, M, N, stride_src, 1)
    x.all_gather(tile, src, x.make_tensor_view(dst_ptr, rows, columns, stride_dst, 1), DIM, ctx, flags_ptr)


def tiles_of(rows: int, columns: int) -> int:
    return triton.cdiv(rows, BLOCK_M) * triton.cdiv(columns, BLOCK_N)


def data_of(rank: int, call: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Draw what a rank has in a call. Small multiples of 1/4, whose sums of a few are exact in all dtypes."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    numbers = torch.randint(-20, 20, shape, generator=generator)
    return (numbers / 4 if dtype.is_floating_point else numbers).to(dtype)


class Buffers:
    """A rank's matrices and flags for a test; each matrix has columns to spare, which must stay as they are."""

    def __init__(self, src: tuple[int, int], dst: tuple[int, int], dtype: torch.dtype) -> None:
        self.ctx = context()
        world_size = self.ctx.get_num_ranks()
        self.src = self.ctx.zeros(src[0], src[1] + 3, dtype=dtype)
        self.dst = self.ctx.full((dst[0], dst[1] + 5), OUTSIDE, dtype=dtype)
        self.flags = self.ctx.zeros(64, world_size + 1, dtype=torch.int64)
        self.columns = src[1], dst[1]
        self.ends = self.ctx.get_heap_bases(), self.ctx.get_watchdog()
        self.ctx.barrier()

    def fill(self, data: torch.Tensor) -> None:
        self.src[:, : self.columns[0]] = data.to(self.src.device)

    def output(self) -> torch.Tensor:
        assert (self.dst[:, self.columns[1] :] == OUTSIDE).all()
        return self.dst[:, : self.columns[1]].cpu()

    def free(self) -> None:
        self.ctx.barrier()
        for buffer in (self.src, self.dst, self.flags):
            self.ctx.free(buffer)
        self.ctx.barrier()


def all_reduce(rank: int, world_size: int, name: str, shape: tuple[int, int], dtype: torch.dtype, counted: bool) -> None:
    buffers = Buffers(shape, shape, dtype)
    for call in range(1, CALLS + 1):
        buffers.fill(data_of(rank, call, shape, dtype))
        all_reduce_kernel[(tiles_of(*shape),)](
            buffers.src, buffers.dst, buffers.flags, *shape, buffers.src.stride(0), buffers.dst.stride(0), rank, call,
            *buffers.ends, world_size, BLOCK_M, BLOCK_N, counted, getattr(x, f"all_reduce_{name}"),
        )  # fmt: skip
        summands = [data_of(peer, call, shape, dtype).double() for peer in range(world_size)]
        assert torch.equal(buffers.output().double(), sum(summands))
    buffers.free()


ALGORITHMS = ["one_shot"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_reduce(ranks: Callable[[int], Ranks], name: str, shape: tuple[int, int], world_size: int) -> None:
    ranks(world_size).call(all_reduce, name, shape, torch.float32, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_reduce_of_every_dtype(ranks: Callable[[int], Ranks], name: str, dtype: torch.dtype) -> None:
    ranks(2).call(all_reduce, name, SHAPES[1], dtype, False)


def all_gather(rank: int, world_size: int, dim: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    whole = list(shape)
    whole[dim] *= world_size
    buffers = Buffers(shape, (whole[0], whole[1]), dtype)
    for call in range(1, CALLS + 1):
        buffers.fill(data_of(rank, call, shape, dtype))
        all_gather_kernel[(tiles_of(*shape),)](
            buffers.src, buffers.dst, buffers.flags, *shape, buffers.src.stride(0), buffers.dst.stride(0), rank,
            *buffers.ends, world_size, BLOCK_M, BLOCK_N, dim,
        )  # fmt: skip
        expected = torch.cat([data_of(peer, call, shape, dtype) for peer in range(world_size)], dim)
        assert torch.equal(buffers.output(), expected)
    buffers.free()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather(ranks: Callable[[int], Ranks], dim: int, shape: tuple[int, int], world_size: int) -> None:
    ranks(world_size).call(all_gather, dim, shape, torch.bfloat16)


