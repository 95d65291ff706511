"""Tensors partitioned over the ranks: each rank holds a block of a global matrix or vector, on the symmetric heap."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..context import Context


@dataclass(frozen=True)
class PartitionedTensor:
    """A global tensor of which each rank holds a block; `partition` makes one.

    Attributes:
        shape: of the global tensor.
        grid: how many ranks each dimension is partitioned over; their product is the world size. Rank r is at
            ``divmod(r, grid[1])`` of a matrix's grid.
        buffer: this rank's block on the heap. It has the same shape on all ranks, `shape` over `grid` rounded up, and
            what lies outside the global tensor is zero and unused.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    buffer: torch.Tensor
    _ctx: Context

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the global tensor, a view of `buffer`; empty where sizes leave nothing for this rank."""
        return self.buffer[tuple(slice(stop - start) for start, stop in self._ranges(self._ctx.get_rank()))]

    @property
    def argument(self) -> tuple[Any, ...]:
        """What a kernel takes, as one argument, for ``x.make_partitioned_view``; a vector is a matrix of one row."""
        as_matrix = [(1, *sizes)[-2:] for sizes in (self.shape, self.buffer.shape, self.grid)]
        (m, n), (shard_m, shard_n), (_, grid_n) = as_matrix
        return (self.buffer, m, n, shard_m, shard_n, grid_n)

    def whole(self) -> torch.Tensor:
        """Return the global tensor, gathered into memory of this rank. Orders nothing: have a barrier before it."""
        gathered = self.buffer.new_empty(self.shape)
        for rank, block in enumerate(self._ctx.peer_view(self.buffer)):
            ranges = self._ranges(rank)
            gathered[tuple(slice(*one) for one in ranges)] = block[tuple(slice(stop - start) for start, stop in ranges)]
        return gathered

    def _ranges(self, rank: int) -> list[tuple[int, int]]:
        """The global indices that a rank holds, in each dimension."""
        ranges = []
        for size, block, parts in reversed(list(zip(self.shape, self.buffer.shape, self.grid, strict=True))):
            rank, place = divmod(rank, parts)
            ranges.append((min(place * block, size), min((place + 1) * block, size)))
        return ranges[::-1]


def partition(
    ctx: Context,
    tensor_or_shape: torch.Tensor | Sequence[int],
    dims: int | Sequence[int] = 0,
    *,
    dtype: torch.dtype | None = None,
    grid: Sequence[int] | None = None,
) -> PartitionedTensor:
    """Partition a matrix or a vector into blocks, one on each rank's heap; collective.

    Blocks are those of `torch.chunk` along each partitioned dimension: sizes need not divide.

    Args:
        ctx: the context.
        tensor_or_shape: the global tensor, of which each rank copies its own block; or its shape, for zeros.
        dims: the dimension that is partitioned, or both of a matrix, over ranks in a grid.
        dtype: of the blocks; None for the tensor's own, or torch's default one.
        grid: how many ranks each of `dims` is partitioned over, in the order of `dims`; None for a grid as square
            as the world size allows.

    Returns:
        The partitioned tensor.

    Raises:
        ValueError: the tensor has neither one nor two dimensions, or an empty one; a dimension does not exist or comes
            twice; or the grid does not have the context's number of ranks.
        HeapExhausted: there is no room.
        TimeoutError, PeerError: see ``Context.check``.
    """
    source = tensor_or_shape if isinstance(tensor_or_shape, torch.Tensor) else None
    shape = tuple(operator.index(size) for size in (tensor_or_shape if source is None else source.shape))
    if len(shape) not in (1, 2) or min(shape) < 1:
        raise ValueError(f"the shape is {shape}; a matrix or a vector with elements can be partitioned")
    parts = _grid_of(shape, dims, grid, ctx.get_num_ranks())
    block = [-(-size // over) for size, over in zip(shape, parts, strict=True)]
    buffer = ctx.zeros(block, dtype=dtype or (None if source is None else source.dtype))
    made = PartitionedTensor(shape, parts, buffer, ctx)
    if source is not None:
        own = tuple(slice(*one) for one in made._ranges(ctx.get_rank()))
        made.local.copy_(source.detach()[own])
    return made


def _grid_of(
    shape: tuple[int, ...], dims: int | Sequence[int], grid: Sequence[int] | None, world_size: int
) -> tuple[int, ...]:
    """Return over how many ranks each dimension is partitioned."""
    asked = [dims] if isinstance(dims, int) else list(dims)
    axes = [dim + len(shape) if dim < 0 else dim for dim in asked]
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(range(len(shape))):
        raise ValueError(f"dims is {dims}; it takes one or more different dimensions of {shape}")
    if grid is None:
        smaller = max(one for one in range(1, math.isqrt(world_size) + 1) if world_size % one == 0)
        grid = [world_size] if len(axes) == 1 else [world_size // smaller, smaller]
    if len(grid) != len(axes) or min(grid) < 1 or math.prod(grid) != world_size:
        raise ValueError(
            f"grid is {tuple(grid)}; it takes {len(axes)} numbers whose product is {world_size}, the ranks"
        )
    over = dict(zip(axes, grid, strict=True))
    return tuple(over.get(dim, 1) for dim in range(len(shape)))
