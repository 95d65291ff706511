"""The tile-level collectives for tests: a kernel that calls any of them, and what each must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

import iris_core
from iris_core import Context, x

BLOCK_M, BLOCK_N = 8, 16
OUTSIDE = 99  # what outputs hold before, and must hold where a collective does not write
Shape = tuple[int, int]


@triton.jit(do_not_specialize=["rank", "epoch"])
def collective_kernel(
    src_ptr, dst_ptr, flags_ptr, words_ptr, src_m, src_n, dst_m, dst_n, stride_src, stride_dst, rank, epoch, heap_bases,
    watchdog_ptr, WORLD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CALL: tl.constexpr,
    PARAMETER: tl.constexpr, OF_DST: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    ctx = iris_core.DeviceContext(rank, WORLD_SIZE, heap_bases, watchdog_ptr)
    src, dst = (
        x.make_tensor_view(src_ptr, src_m, src_n, stride_src, 1),
        x.make_tensor_view(dst_ptr, dst_m, dst_n, stride_dst, 1),
    )
    tiles_n = tl.cdiv(dst_n if OF_DST else src_n, BLOCK_N)
    tile = x.TileView(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, BLOCK_M, BLOCK_N)
    CALL(tile, src, dst, ctx, flags_ptr, None if COUNTED else epoch, words_ptr, PARAMETER)


@triton.jit
def call_all_reduce(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, ALGORITHM: tl.constexpr):
    ALGORITHM(tile, src, dst, ctx, flags_ptr, epoch)


@triton.jit
def call_all_reduce_spinlock(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    x.all_reduce_spinlock(tile, src, dst, words_ptr, ctx, flags_ptr, epoch)


@triton.jit
def call_all_gather(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, DIM: tl.constexpr):
    x.all_gather(tile, src, dst, DIM, ctx, flags_ptr, epoch)


@triton.jit
def call_all_to_all(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, N_PER_RANK: tl.constexpr):
    x.all_to_all(tile, src, dst, N_PER_RANK, ctx, flags_ptr, epoch)


@triton.jit
def call_broadcast(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, SOURCE: tl.constexpr):
    x.broadcast(tile, src, dst, SOURCE, ctx, flags_ptr, epoch)


@triton.jit
def call_scatter(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, DIM: tl.constexpr):
    x.scatter(tile, src, dst, DIM, 0, ctx, flags_ptr, epoch)


@triton.jit
def call_reduce(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, ROOT: tl.constexpr):
    x.reduce(tile, src, dst, ROOT, ctx, flags_ptr, epoch)


@triton.jit
def call_reduce_scatter(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    x.reduce_scatter(tile, src, dst, ctx, flags_ptr, epoch)


@triton.jit
def call_messages(tile, src, dst, ctx, flags_ptr, epoch, words_ptr, PARAMETER: tl.constexpr):
    """A chain: from rank 0 to the last, each adding its own to what has come."""
    if ctx.rank > 0:
        x.recv(tile, dst, ctx.rank - 1, ctx, words_ptr, epoch)
    else:
        to_ptr, mask = dst.tile_ptr(tile)
        tl.store(to_ptr, tl.load(src.tile_ptr(tile)[0], mask=mask), mask=mask)
        tl.debug_barrier()
    if ctx.rank < ctx.world_size - 1:
        x.send(tile, dst, dst, ctx.rank + 1, ctx, words_ptr, epoch)


@dataclass(frozen=True)
class Collective:
    """A collective.

    Args:
        call: the jit function that calls it.
        expected: of all ranks' inputs and a rank, what the output is; NaN where it is not written.
        parameter: what `call` takes last.
        src, dst: by how much the input's and the output's sizes exceed a rank's part: a dimension, or None.
        of_dst: whether tiles are those of the output.
        initial: what the output holds before.
        atomic: whether only dtypes that have atomics work.
        steps: the stages of a call whose waits are needed; empty, where the words are not of a call.
        barriers: whether the caller zeroes the words and has barriers around a call.
    """

    call: Any
    expected: Callable[[list[torch.Tensor], int], torch.Tensor]
    parameter: Any = None
    src: int | None = None
    dst: int | None = None
    of_dst: bool = False
    initial: int = OUTSIDE
    atomic: bool = False
    steps: tuple[int, ...] = (1, 2)
    barriers: bool = False


def total(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.stack(inputs).sum(0)


def own_tiles(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    world_size, result = len(inputs), total(inputs, rank)
    rows, columns = result.shape
    tiles_n = triton.cdiv(columns, BLOCK_N)
    share = tiles_of((rows, columns)) // world_size
    for tile in range(tiles_of((rows, columns))):
        if (min(tile // share, world_size - 1) if share else world_size - 1) != rank:
            m, n = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
            result[m : m + BLOCK_M, n : n + BLOCK_N] = float("nan")
    return result


def on_root(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    return total(inputs, rank) if rank == 0 else torch.full_like(inputs[0], float("nan"))


COLLECTIVES = {
    "all_reduce_one_shot": Collective(call_all_reduce, total, x.all_reduce_one_shot),
    "all_reduce_two_shot": Collective(call_all_reduce, total, x.all_reduce_two_shot),
    "all_reduce_ring": Collective(call_all_reduce, total, x.all_reduce_ring, steps=(1, 2, 3)),
    "all_reduce_atomic": Collective(call_all_reduce, total, x.all_reduce_atomic, initial=0, atomic=True),
    "all_reduce_spinlock": Collective(call_all_reduce_spinlock, total, initial=0),
    "all_gather_0": Collective(call_all_gather, lambda inputs, rank: torch.cat(inputs, 0), 0, dst=0),
    "all_gather_1": Collective(call_all_gather, lambda inputs, rank: torch.cat(inputs, 1), 1, dst=1),
    "all_to_all": Collective(
        call_all_to_all,
        lambda inputs, rank: torch.cat([one.chunk(len(inputs), 1)[rank] for one in inputs], 1),
        "columns",
        src=1,
        dst=1,
        of_dst=True,
    ),
    "broadcast": Collective(call_broadcast, lambda inputs, rank: inputs[0], 0),
    "scatter_0": Collective(
        call_scatter, lambda inputs, rank: inputs[0].chunk(len(inputs), 0)[rank], 0, src=0, of_dst=True
    ),
    "scatter_1": Collective(
        call_scatter, lambda inputs, rank: inputs[0].chunk(len(inputs), 1)[rank], 1, src=1, of_dst=True
    ),
    "reduce": Collective(call_reduce, on_root, 0),
    "reduce_scatter": Collective(call_reduce_scatter, own_tiles),
    "messages": Collective(call_messages, lambda inputs, rank: inputs[0], steps=()),
}


def tiles_of(shape: Shape) -> int:
    return triton.cdiv(shape[0], BLOCK_M) * triton.cdiv(shape[1], BLOCK_N)


def grown(shape: Shape, dim: int | None, world_size: int) -> Shape:
    return (shape[0] * (world_size if dim == 0 else 1), shape[1] * (world_size if dim == 1 else 1))


def data_of(rank: int, call: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Draw what a rank has in a call: small multiples of 1/4, whose sums of a few are exact in all dtypes."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    numbers = torch.randint(-20, 20, shape, generator=generator)
    return (numbers / 4 if dtype.is_floating_point else numbers).to(dtype)


class Run:
    """A rank's matrices and flags for calls of a collective; each matrix has columns to spare.

    Args:
        ctx: the rank's context.
        collective: what is called.
        part: the size of a rank's part.
        dtype: of the matrices.
        counted: whether calls are counted on the device.
        flagged: whether there are flags.
    """

    def __init__(
        self,
        ctx: Context,
        collective: Collective,
        part: Shape,
        dtype: torch.dtype,
        *,
        counted: bool = True,
        flagged: bool = True,
    ) -> None:
        self.ctx, self.collective, self.part, self.counted = ctx, collective, part, counted
        world_size = ctx.get_num_ranks()
        self.src_shape = grown(part, self.collective.src, world_size)
        self.dst_shape = grown(part, self.collective.dst, world_size)
        self.src = ctx.zeros(self.src_shape[0], self.src_shape[1] + 3, dtype=dtype)
        self.dst = ctx.zeros(self.dst_shape[0], self.dst_shape[1] + 5, dtype=dtype)
        self.tiles = tiles_of(self.dst_shape if self.collective.of_dst else self.src_shape)
        self.flags = ctx.zeros(self.tiles, world_size + 1, dtype=torch.int64) if flagged else None
        self.words = ctx.zeros(self.tiles, 4, dtype=torch.int64)
        ctx.barrier()

    def __call__(self, call: int, data: torch.Tensor) -> torch.Tensor:
        """Make call number `call`; return the whole output, with the columns to spare."""
        self.src[:, : self.src_shape[1]] = data.to(self.src.device)
        self.dst.fill_(self.collective.initial)
        if self.collective.barriers:
            self.words.zero_()
            self.ctx.barrier()
        parameter = self.part[1] if self.collective.parameter == "columns" else self.collective.parameter
        collective_kernel[(self.tiles,)](
            self.src, self.dst, self.flags, self.words, *self.src_shape, *self.dst_shape, self.src.stride(0),
            self.dst.stride(0), self.ctx.get_rank(), call, self.ctx.get_heap_bases(), self.ctx.get_watchdog(),
            self.ctx.get_num_ranks(), BLOCK_M, BLOCK_N, self.collective.call, parameter, self.collective.of_dst,
            self.counted,
        )  # fmt: skip
        if self.collective.barriers:
            self.ctx.barrier()
        return self.dst.cpu()

    def check(self, call: int, dtype: torch.dtype) -> None:
        """Make a call with `data_of` and look at every element of the output."""
        rank, world_size = self.ctx.get_rank(), self.ctx.get_num_ranks()
        inputs = [data_of(peer, call, self.src_shape, dtype) for peer in range(world_size)]
        output = self(call, inputs[rank]).double()
        expected = torch.full_like(output, self.collective.initial)
        written = self.collective.expected([one.double() for one in inputs], rank)
        expected[:, : written.shape[1]] = torch.where(written.isnan(), float(self.collective.initial), written)
        assert torch.equal(output, expected)

    def free(self) -> None:
        self.ctx.barrier()
        for buffer in (self.src, self.dst, self.flags, self.words):
            if buffer is not None:
                self.ctx.free(buffer)
        self.ctx.barrier()
