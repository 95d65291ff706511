"""Views: where tiles lie, their masks, and what is given as constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context

from iris_core import x


@triton.jit
def views_kernel(matrix_ptr, found_ptr, M, N, stride_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mark the elements of tile (1, 1) by 1, of that tile one row up by 2, and of the whole's offset view by 4."""
    tile = x.TileView(tl.program_id(0) + 1, tl.program_id(0) + 1, BLOCK_M, BLOCK_N)
    view = x.make_tensor_view(matrix_ptr, M, N, stride_m, 1)
    pointers, mask = view.tile_ptr(tile)
    tl.store(pointers, tl.load(pointers, mask=mask) + 1, mask=mask)
    same, same_mask = x.tile_ptr(matrix_ptr, M, N, stride_m, 1, tile.pid_m, tile.pid_n, BLOCK_M, BLOCK_N)
    places = same.to(tl.int64)
    differ = (places != pointers.to(tl.int64)) | (same_mask != mask)
    rm, rn, layout_mask = tile.layout(M, N)
    by_layout = matrix_ptr + rm[:, None] * stride_m + rn[None, :]
    differ |= (layout_mask != mask) | (places != by_layout.to(tl.int64))
    tl.debug_barrier()
    pointers, mask = view.offset_tile_ptr(tile, -1, 0, mask)
    tl.store(pointers, tl.load(pointers, mask=mask) + 2, mask=mask)
    tl.debug_barrier()
    corner = x.offset_ptr(matrix_ptr, stride_m, 1, 2, 3)
    tl.store(corner, tl.load(corner) + 4)
    tl.debug_barrier()
    pointer = view.offset(2, 3).ptr
    tl.store(pointer, tl.load(pointer) + 8)
    with_data = x.Tile(tile.pid_m, tile.pid_n, BLOCK_M, BLOCK_N, differ.to(tl.int32))
    tl.store(found_ptr, tl.sum(with_data.data))
    tl.store(found_ptr + 1, view.number_of_tiles(BLOCK_M, BLOCK_N))
    tl.store(found_ptr + 2, view.tile_id(with_data))


def use_views(rank: int, world_size: int, shape: tuple[int, int]) -> tuple[list[list[int]], list[int]]:
    ctx = context()
    matrix, found = ctx.zeros(*shape, dtype=torch.int32), ctx.zeros(3, dtype=torch.int32)
    views_kernel[(1,)](matrix, found, *shape, matrix.stride(0), 2, 4)
    ctx.barrier()
    result = matrix.tolist(), found.tolist()
    ctx.free(matrix)
    ctx.free(found)
    return result


@pytest.mark.parametrize("shape", [(4, 8), (3, 7), (3, 6)])
def test_tiles_lie_where_views_say(ranks: Callable[[int], Ranks], shape: tuple[int, int]) -> None:
    ((matrix, found),) = ranks(1).call(use_views, shape)
    expected = torch.zeros(shape, dtype=torch.int32)
    rows = min(2, shape[0] - 2)  # of the tile that the matrix has
    expected[2:4, 4:] += 1
    expected[1 : 1 + rows, 4:] += 2
    expected[2, 3] += 12
    assert matrix == expected.tolist()
    assert found == [0, 4, 3]
