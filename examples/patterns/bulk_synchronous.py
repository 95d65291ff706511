"""GEMM + all-scatter, bulk-synchronous: the plain GEMM, then a kernel that stores its tiles to all peers.

Stream order alone stands between the two: no flag, and no overlap.

- python examples/patterns/bulk_synchronous.py --ranks 4
"""

import triton
import triton.language as tl
from _harness import main
from persistent_gemm import gemm_kernel

import iris_core
from iris_core import x


@triton.jit
def all_scatter_kernel(c_ptr, context_tensor, M, N, BLOCK: tl.constexpr):
    """Store this rank's block of C to all peers; programs take tiles in turn."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    c = x.make_tensor_view(c_ptr + ctx.rank * N, M, N, ctx.world_size * N, 1)
    for number in range(tl.program_id(0), c.number_of_tiles(BLOCK, BLOCK), tl.num_programs(0)):
        tile = x.TileView(number // tl.cdiv(N, BLOCK), number % tl.cdiv(N, BLOCK), BLOCK, BLOCK)
        pointers, mask = c.tile_ptr(tile)
        value = tl.load(pointers, mask=mask)
        for step in range(1, ctx.world_size):
            ctx.store(pointers, value, (ctx.rank + step) % ctx.world_size, mask=mask)


def launch(call):
    gemm_kernel[(call.programs,)](call.a, call.b, call.c, call.words, call.m, call.n, call.k, call.block)
    all_scatter_kernel[(call.programs,)](call.c, call.words, call.m, call.n, call.block)


if __name__ == "__main__":
    main(__doc__, launch)
