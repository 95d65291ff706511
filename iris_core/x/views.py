"""Where a tile lies: `TileView` and `Tile` (which tile), `TensorView` (of which matrix).

Names and arguments are those of the Iris documentation. Masks are of the matrix's bounds, offsets are 64 bits wide.
"""

# Annotations must be types here: Triton's aggregates look at them.
import triton
import triton.language as tl

from ..device.aggregate import aggregate


@triton.constexpr_function
def as_value(number):
    """Return a tensor as it is, and what comes as a number, as a size that equals 1 does, as a constant."""
    return number if isinstance(number, tl.tensor) else tl.constexpr(number)


@triton.jit
def tile_layout(pid_m, pid_n, M, N, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr):
    """Return a tile's rows (BLOCK_SIZE_M), its columns (BLOCK_SIZE_N), and the mask of what lies in an M × N matrix.

    Args:
        pid_m, pid_n: the tile's row and column of tiles.
        M, N: rows and columns of the matrix.
        BLOCK_SIZE_M, BLOCK_SIZE_N: rows and columns of a tile, powers of two.
    """
    rm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    rn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    return rm, rn, (rm < M)[:, None] & (rn < N)[None, :]


@triton.jit
def tile_ptr(ptr, M, N, stride_m, stride_n, pid_m, pid_n, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr):
    """Return the pointers to a tile of a matrix (BLOCK_SIZE_M, BLOCK_SIZE_N), and the mask of what lies in it.

    Args:
        ptr: to the matrix, anywhere.
        stride_m, stride_n: its strides, in elements.
        pid_m, pid_n, M, N, BLOCK_SIZE_M, BLOCK_SIZE_N: as of `tile_layout`.
    """
    rm, rn, mask = tile_layout(pid_m, pid_n, M, N, BLOCK_SIZE_M, BLOCK_SIZE_N)
    return ptr + offsets_of(rm, rn, stride_m, stride_n), mask


@triton.jit
def offset_ptr(ptr, stride_m, stride_n, offset_m, offset_n):
    """Return the pointer to an element of a matrix.

    Args:
        ptr: to the matrix, anywhere.
        stride_m, stride_n: its strides, in elements.
        offset_m, offset_n: the element's row and column.
    """
    return ptr + tl.cast(offset_m, tl.int64) * stride_m + tl.cast(offset_n, tl.int64) * stride_n


@triton.jit
def offsets_of(rm, rn, stride_m, stride_n):
    """Return the offsets of the elements in these rows and columns."""
    return rm.to(tl.int64)[:, None] * stride_m + rn.to(tl.int64)[None, :] * stride_n


@triton.jit
def _layout(self, M, N):
    """Return the tile's rows, its columns, and the mask of what lies in a matrix.

    Args:
        M, N: rows and columns of the matrix.
    """
    return tile_layout(self.pid_m, self.pid_n, M, N, self.block_m, self.block_n)


@triton.jit
def _indices(self):
    """Return the tile's rows and its columns."""
    rm = self.pid_m * self.block_m + tl.arange(0, self.block_m)
    rn = self.pid_n * self.block_n + tl.arange(0, self.block_n)
    return rm, rn


@aggregate
class TileView:
    """A tile, by its place among the tiles of a matrix and its size.

    Args:
        pid_m, pid_n: its row and column of tiles.
        block_m, block_n: rows and columns of a tile, constant powers of two.
    """

    pid_m: tl.core.base_value
    pid_n: tl.core.base_value
    block_m: tl.constexpr
    block_n: tl.constexpr

    @triton.constexpr_function
    def __init__(self, pid_m, pid_n, block_m, block_n):
        self.pid_m = as_value(pid_m)
        self.pid_n = as_value(pid_n)
        self.block_m = tl.constexpr(block_m)
        self.block_n = tl.constexpr(block_n)

    layout = _layout
    indices = _indices


@aggregate
class Tile:
    """A `TileView` and what was computed for it.

    Args:
        pid_m, pid_n: its row and column of tiles.
        block_m, block_n: rows and columns of a tile, constant powers of two.
        data: values in registers, (block_m, block_n), for the kernel. Collectives look at memory alone.
    """

    pid_m: tl.core.base_value
    pid_n: tl.core.base_value
    block_m: tl.constexpr
    block_n: tl.constexpr
    data: tl.tensor

    @triton.constexpr_function
    def __init__(self, pid_m, pid_n, block_m, block_n, data):
        self.pid_m = as_value(pid_m)
        self.pid_n = as_value(pid_n)
        self.block_m = tl.constexpr(block_m)
        self.block_n = tl.constexpr(block_n)
        self.data = data

    layout = _layout
    indices = _indices


@aggregate
class TensorView:
    """A matrix in memory; `make_tensor_view` makes one.

    Args:
        ptr: the calling rank's own pointer to it.
        M, N: rows and columns.
        stride_m, stride_n: strides in elements.
    """

    ptr: tl.tensor
    M: tl.core.base_value
    N: tl.core.base_value
    stride_m: tl.core.base_value
    stride_n: tl.core.base_value

    @triton.constexpr_function
    def __init__(self, ptr, M, N, stride_m, stride_n):
        self.ptr = ptr
        self.M = as_value(M)
        self.N = as_value(N)
        self.stride_m = as_value(stride_m)
        self.stride_n = as_value(stride_n)

    @triton.jit
    def tile_ptr(self, tile):
        """Return the pointers to a tile, and the mask of what lies in the matrix."""
        rm, rn = tile.indices()
        return self.tile_ptr_from_indices(rm, rn, tile.block_m, tile.block_n)

    @triton.jit
    def tile_ptr_from_indices(self, rm, rn, block_m: tl.constexpr, block_n: tl.constexpr):
        """Return the pointers to these rows and columns, and the mask of what lies in the matrix.

        Args:
            rm, rn: the rows (block_m,) and the columns (block_n,).
            block_m, block_n: how many they are.
        """
        mask = (rm < self.M)[:, None] & (rn < self.N)[None, :]
        return self.ptr + offsets_of(rm, rn, self.stride_m, self.stride_n), mask

    @triton.jit
    def offset_tile_ptr(self, tile, offset_m=0, offset_n=0, src_mask=None):
        """Return the pointers to a tile that is moved, and the mask of what lies in the matrix there.

        Args:
            tile: a `Tile` or `TileView`.
            offset_m, offset_n: by how many rows and columns.
            src_mask: which of its elements are meant, (block_m, block_n) or a shape that broadcasts to that; None for
                all.
        """
        rm, rn = tile.indices()
        pointers, mask = self.tile_ptr_from_indices(rm + offset_m, rn + offset_n, tile.block_m, tile.block_n)
        if src_mask is not None:
            mask = mask & src_mask
        return pointers, mask

    @triton.jit
    def offset(self, offset_m=0, offset_n=0):
        """Return a view of the same size that begins at another element.

        Args:
            offset_m, offset_n: its row and column.
        """
        ptr = offset_ptr(self.ptr, self.stride_m, self.stride_n, offset_m, offset_n)
        return TensorView(ptr, self.M, self.N, self.stride_m, self.stride_n)

    @triton.jit
    def number_of_tiles(self, block_m, block_n):
        """Return how many tiles cover the matrix.

        Args:
            block_m, block_n: rows and columns of a tile.
        """
        return tl.cdiv(self.M, block_m) * tl.cdiv(self.N, block_n)

    @triton.jit
    def tile_id(self, tile):
        """Return a tile's place among the matrix's, by rows."""
        return tile.pid_m * tl.cdiv(self.N, tile.block_n) + tile.pid_n


@triton.jit
def make_tensor_view(ptr, M, N, stride_m, stride_n):
    """Return a `TensorView` of a matrix.

    Args:
        ptr: the calling rank's own pointer to it; on the heap where peers read or write it.
        M, N: rows and columns, at run time or as constants.
        stride_m, stride_n: strides in elements, at run time or as constants.
    """
    return TensorView(ptr, M, N, stride_m, stride_n)
