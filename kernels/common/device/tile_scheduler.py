"""Tile schedulers: which tile an index stands for, in both main loops.

A scheduler is a jit function ``scheduler(index, tiled, rank, TILE)`` that returns an index's work tile;
`tiled` says what is cut into tiles. A program of the portable main loop takes the indices first, first + step, … in
ascending order (../portable/tile_loop.py), all programs as many, or one more; a program of sm90 those of its waves
(../hopper/waves.py), of which several programs may split the last.

| scheduler | `tiled` | order |
|---|---|---|
| `row_grouped` | any bundle with m and n | one matrix |
| `own_first` | `Shards` | this rank's shard, then those of rank+1, rank+2, … |
| `peers_first` | `Shards` | the shards of rank+1, rank+2, …, or a tile of each in turn¹; this rank's last |
| `own_last` | `Shards` | this rank's shard, whose tiles are counted from 0 |
| `own_then_row_chunks`² | `ChunkedShards` | this rank's shard, then a row chunk of each peer's, and so on |
| `mixed`³ | `MixedShards` | the peers' shards, tiles of this rank's between them |

¹ with FULLY_CONNECTED, ² ../../all_gather_gemm/hopper/workgroup_specialized.py,
³ ../../gemm_reduce_scatter/hopper/tile_scheduler.py.
Stream-K has a scheduler of its own (../portable/stream_k.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris_core.device.cache_key import in_cache_key


@in_cache_key
class Shards(NamedTuple):
    """A matrix of `rows` rows cut into shards of rows, one per rank; the largest is (m, n).

    All ranks' tiles are numbered as those of the largest; what reaches past the end of a smaller one is masked. In A
    shards begin `a_rows_apart` rows apart: 0 where A is the shard alone.
    """

    m: Any
    n: Any
    rows: Any
    a_rows_apart: Any


@in_cache_key
class WorkTile(NamedTuple):
    """What a program computes next: the tile at (row, col) of the (m, n) matrix that is the shard of rank `owner`.

    `index` counts in the order of all tiles, `tile` in the shard, `turn` the shards before it. The shard begins at row
    `start` of the matrix. Row `a_row` of A and column `b_col` of B belong to row `row` and column `col` of the shard.
    """

    index: Any
    tile: Any
    turn: Any
    owner: Any
    start: Any
    row: Any
    col: Any
    a_row: Any
    b_col: Any
    m: Any
    n: Any


@in_cache_key
class TileSplit(NamedTuple):
    """A program's part of the work on the tile of an index: its k steps from `start`, without `stop`.

    It is the `split`-th of the `splits` programs that split the tile; alone if there is one.
    """

    index: Any
    start: Any
    stop: Any
    split: Any
    splits: Any


@triton.jit
def num_tiles(block, TILE: tl.constexpr):
    """Return the number of tiles of an (m, n) matrix."""
    return tl.cdiv(block.m, TILE.BLOCK_M) * tl.cdiv(block.n, TILE.BLOCK_N)


@triton.jit
def tile_origin(tile, block, TILE: tl.constexpr):
    """Return the first row and column of a tile; consecutive tiles share GROUP_M rows of tiles, for the L2 cache."""
    tiles_m = tl.cdiv(block.m, TILE.BLOCK_M)
    tiles_n = tl.cdiv(block.n, TILE.BLOCK_N)
    group_size = TILE.GROUP_M * tiles_n
    first_m = (tile // group_size) * TILE.GROUP_M
    rows = min(tiles_m - first_m, TILE.GROUP_M)
    within = tile % group_size
    return (first_m + within % rows) * TILE.BLOCK_M, (within // rows) * TILE.BLOCK_N


@triton.jit
def tile_at(row, column, block, TILE: tl.constexpr):
    """Return which tile is in a row and a column of tiles: `tile_origin` backwards."""
    first = row // TILE.GROUP_M * TILE.GROUP_M
    rows = min(tl.cdiv(block.m, TILE.BLOCK_M) - first, TILE.GROUP_M)
    return first * tl.cdiv(block.n, TILE.BLOCK_N) + column * rows + row - first


@triton.jit
def row_grouped(index, block, rank, TILE: tl.constexpr):
    """Return the work tile of an index of one matrix, which belongs to the rows of A of the same numbers."""
    row, col = tile_origin(index, block, TILE)
    return WorkTile(index, index, 0, rank, 0, row, col, row, col, block.m, block.n)


@triton.jit
def own_first(index, shards, rank, TILE: tl.constexpr):
    """Return the work tile of an index in the order that begins with this rank's shard."""
    tiles = num_tiles(shards, TILE)
    turn = index // tiles
    return _tile_of_shard(index, index % tiles, turn, (rank + turn) % TILE.WORLD_SIZE, shards, TILE)


@triton.jit
def peers_first(index, shards, rank, TILE: tl.constexpr):
    """Return the work tile of an index in the order that ends with this rank's shard."""
    tiles = num_tiles(shards, TILE)
    place = place_by_shard(index, tiles, TILE)
    turn = place // tiles
    return _tile_of_shard(index, place % tiles, turn, (rank + 1 + turn) % TILE.WORLD_SIZE, shards, TILE)


@triton.jit
def place_by_shard(index, tiles, TILE: tl.constexpr):
    """Return the place of an index of `peers_first` in the order in which shards of so many tiles follow one another.

    With FULLY_CONNECTED the index takes the first tile of each peer's shard, then the second of each, and so on, so
    that what is computed at the same time goes over all links; this rank's tiles are the last all the same.
    """
    if not TILE.FULLY_CONNECTED or TILE.WORLD_SIZE == 1:
        return index
    peers = TILE.WORLD_SIZE - 1
    return tl.where(index < tiles * peers, index % peers * tiles + index // peers, index)


@triton.jit
def own_last(tile, shards, rank, TILE: tl.constexpr):
    """Return the work tile of a tile of this rank's shard, with which the order of `peers_first` ends."""
    index = num_tiles(shards, TILE) * (TILE.WORLD_SIZE - 1) + tile
    return _tile_of_shard(index, tile, TILE.WORLD_SIZE - 1, rank, shards, TILE)


@triton.jit
def _tile_of_shard(index, tile, turn, owner, shards, TILE: tl.constexpr):
    start = min(owner * shards.m, shards.rows)
    m = min(shards.m, shards.rows - start)
    row, col = tile_origin(tile, shards, TILE)
    a_row = owner * shards.a_rows_apart + row
    return WorkTile(index, tile, turn, owner, start, row, col, a_row, col, m, shards.n)


@triton.jit
def next_index(first, step, start):
    """Return the first of first, first + step, … that is `start` or more."""
    return first + tl.cdiv(tl.maximum(start - first, 0), step) * step
