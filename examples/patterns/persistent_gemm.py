"""A persistent GEMM in a page, with no communication: what the patterns beside it add their lines to.

Each rank multiplies A by its columns of B, and keeps its block of columns of C.

- python examples/patterns/persistent_gemm.py --ranks 4
"""

import triton
import triton.language as tl
from _harness import main

import iris_core
from iris_core import x


@triton.jit
def multiply_tile(a_ptr, b_ptr, tile, M, N, K, BLOCK: tl.constexpr):
    """Return a tile of A @ B."""
    rows, columns, _ = tile.layout(M, N)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        ks = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=(rows < M)[:, None] & (ks < K)[None, :], other=0)
        b = tl.load(b_ptr + ks[:, None] * N + columns, mask=(ks < K)[:, None] & (columns < N)[None, :], other=0)
        total = tl.dot(a, b, total)
    return total


@triton.jit
def gemm_kernel(a_ptr, b_ptr, c_ptr, context_tensor, M, N, K, BLOCK: tl.constexpr):
    """Write this rank's block of C; programs take tiles in turn."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    c = x.make_tensor_view(c_ptr + ctx.rank * N, M, N, ctx.world_size * N, 1)
    for number in range(tl.program_id(0), c.number_of_tiles(BLOCK, BLOCK), tl.num_programs(0)):
        tile = x.TileView(number // tl.cdiv(N, BLOCK), number % tl.cdiv(N, BLOCK), BLOCK, BLOCK)
        value = multiply_tile(a_ptr, b_ptr, tile, M, N, K, BLOCK).to(c_ptr.dtype.element_ty)
        pointers, mask = c.tile_ptr(tile)
        tl.store(pointers, value, mask=mask)


def launch(call):
    gemm_kernel[(call.programs,)](call.a, call.b, call.c, call.words, call.m, call.n, call.k, call.block)


if __name__ == "__main__":
    main(__doc__, launch, False)
