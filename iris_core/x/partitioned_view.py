"""Global tiles of a matrix that is partitioned over the ranks: loads and stores go to whichever ranks hold them."""

# Annotations must be types here: Triton's aggregates look at them.
import triton
import triton.language as tl

from ..device.aggregate import aggregate
from ..device.rma import translate
from .views import as_value, offsets_of


@aggregate
class PartitionedView:
    """A matrix in blocks over a grid of ranks; `make_partitioned_view` makes one.

    A tile is one of the whole matrix. It may lie in several ranks' blocks; of one that lies in a single block, a load
    or store is one access with one translation.

    Args:
        ptr: the calling rank's own block, on the heap, contiguous.
        M, N: rows and columns of the whole matrix.
        shard_m, shard_n: rows and columns of a block.
        grid_n: ranks along the columns: rank r has the block at row r // grid_n and column r % grid_n.
    """

    ptr: tl.tensor
    M: tl.core.base_value
    N: tl.core.base_value
    shard_m: tl.core.base_value
    shard_n: tl.core.base_value
    grid_n: tl.core.base_value

    @triton.constexpr_function
    def __init__(self, ptr, M, N, shard_m, shard_n, grid_n):
        self.ptr = ptr
        self.M = as_value(M)
        self.N = as_value(N)
        self.shard_m = as_value(shard_m)
        self.shard_n = as_value(shard_n)
        self.grid_n = as_value(grid_n)

    @triton.jit
    def owner(self, tile):
        """Return the rank that holds a tile's first element."""
        row = tile.pid_m * tile.block_m // self.shard_m
        column = tile.pid_n * tile.block_n // self.shard_n
        return row * self.grid_n + column

    @triton.jit
    def load(self, tile, ctx):
        """Return a tile, zero outside the matrix. Orders nothing, as `gather`: see `wait`, or have a barrier before.

        Args:
            tile: a `Tile` or `TileView`, of the whole matrix.
            ctx: the context object.
        """
        value = tl.zeros((tile.block_m, tile.block_n), self.ptr.dtype.element_ty)
        first_m, last_m = _blocks(tile.pid_m * tile.block_m, tile.block_m, self.M, self.shard_m)
        first_n, last_n = _blocks(tile.pid_n * tile.block_n, tile.block_n, self.N, self.shard_n)
        for block_row in range(first_m, last_m):
            for block_column in range(first_n, last_n):
                pointers, mask = self.part(tile, block_row, block_column, ctx)
                # .cg: L1 may hold what memory held earlier.
                value = tl.load(pointers, mask=mask, other=value, cache_modifier=".cg")
        return value

    @triton.jit
    def store(self, tile, value, ctx):
        """Store a tile. Orders nothing: signal, or have a barrier after it.

        Args:
            value: the tile's values (block_m, block_n), cast to the matrix's dtype.
            tile, ctx: as of `load`.
        """
        value = value.to(self.ptr.dtype.element_ty)
        first_m, last_m = _blocks(tile.pid_m * tile.block_m, tile.block_m, self.M, self.shard_m)
        first_n, last_n = _blocks(tile.pid_n * tile.block_n, tile.block_n, self.N, self.shard_n)
        for block_row in range(first_m, last_m):
            for block_column in range(first_n, last_n):
                pointers, mask = self.part(tile, block_row, block_column, ctx)
                tl.store(pointers, value, mask=mask)

    @triton.jit
    def part(self, tile, block_row, block_column, ctx):
        """Return pointers to a tile in a block, on the rank that has it, and the mask of what lies in the block.

        Args:
            block_row, block_column: the block's place in the grid.
            tile, ctx: as of `load`.
        """
        rm, rn = tile.indices()
        rows, columns = rm - block_row * self.shard_m, rn - block_column * self.shard_n
        in_rows = (rows >= 0) & (rows < self.shard_m) & (rm < self.M)
        in_columns = (columns >= 0) & (columns < self.shard_n) & (rn < self.N)
        owner = block_row * self.grid_n + block_column
        ptr = translate(self.ptr, ctx.rank, owner, ctx.heap_bases)
        return ptr + offsets_of(rows, columns, self.shard_n, 1), in_rows[:, None] & in_columns[None, :]


@triton.jit
def make_partitioned_view(argument):
    """Return a `PartitionedView` of what the host's ``PartitionedTensor.argument`` gave the kernel."""
    return PartitionedView(argument[0], argument[1], argument[2], argument[3], argument[4], argument[5])


@triton.jit
def _blocks(first, size, end, shard):
    """Return the first block that holds any of so many indices from `first` on, and the one after the last."""
    return first // shard, tl.cdiv(tl.minimum(first + size, end), shard)
