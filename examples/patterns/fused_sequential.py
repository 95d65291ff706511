"""GEMM + all-scatter, fused sequential: the program that computed a tile stores it to all ranks before its next tile.

No flag: nobody waits inside a rank.

- python examples/patterns/fused_sequential.py --ranks 4
"""

import triton
import triton.language as tl
from _harness import main
from persistent_gemm import multiply_tile

import iris_core
from iris_core import x


@triton.jit
def gemm_kernel(a_ptr, b_ptr, c_ptr, context_tensor, M, N, K, BLOCK: tl.constexpr):
    """Write this rank's block of C on all ranks; programs take tiles in turn."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    c = x.make_tensor_view(c_ptr + ctx.rank * N, M, N, ctx.world_size * N, 1)
    for number in range(tl.program_id(0), c.number_of_tiles(BLOCK, BLOCK), tl.num_programs(0)):
        tile = x.TileView(number // tl.cdiv(N, BLOCK), number % tl.cdiv(N, BLOCK), BLOCK, BLOCK)
        value = multiply_tile(a_ptr, b_ptr, tile, M, N, K, BLOCK).to(c_ptr.dtype.element_ty)
        pointers, mask = c.tile_ptr(tile)
        tl.store(pointers, value, mask=mask)
        for step in range(1, ctx.world_size):
            ctx.store(pointers, value, (ctx.rank + step) % ctx.world_size, mask=mask)


def launch(call):
    gemm_kernel[(call.programs,)](call.a, call.b, call.c, call.words, call.m, call.n, call.k, call.block)


if __name__ == "__main__":
    main(__doc__, launch)
