"""GEMM + all-scatter, producer-consumer: one kernel computes tiles, another on its own stream and SMs stores them.

| flag | written by | awaited by |
|---|---|---|
| one per tile, holding the number of the call | the GEMM's program, after the tile | the scattering program |

The producer is queued first: a consumer that spins while the producer's module loads could wait for ever.

- python examples/patterns/producer_consumer.py --ranks 4
"""

import triton
import triton.language as tl
from _harness import main
from persistent_gemm import multiply_tile

import iris_core
from iris_core import x


@triton.jit(do_not_specialize=["call"])
def gemm_kernel(a_ptr, b_ptr, c_ptr, flags_ptr, call, context_tensor, M, N, K, BLOCK: tl.constexpr):
    """Write this rank's block of C, and signal each tile; programs take tiles in turn."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    c = x.make_tensor_view(c_ptr + ctx.rank * N, M, N, ctx.world_size * N, 1)
    for number in range(tl.program_id(0), c.number_of_tiles(BLOCK, BLOCK), tl.num_programs(0)):
        tile = x.TileView(number // tl.cdiv(N, BLOCK), number % tl.cdiv(N, BLOCK), BLOCK, BLOCK)
        value = multiply_tile(a_ptr, b_ptr, tile, M, N, K, BLOCK).to(c_ptr.dtype.element_ty)
        pointers, mask = c.tile_ptr(tile)
        tl.store(pointers, value, mask=mask)
        iris_core.signal(flags_ptr + number, call, "gpu")


@triton.jit(do_not_specialize=["call"])
def all_scatter_kernel(c_ptr, flags_ptr, call, context_tensor, M, N, BLOCK: tl.constexpr):
    """Store this rank's block of C to all peers, each tile as it is signalled; programs take tiles in turn."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    c = x.make_tensor_view(c_ptr + ctx.rank * N, M, N, ctx.world_size * N, 1)
    for number in range(tl.program_id(0), c.number_of_tiles(BLOCK, BLOCK), tl.num_programs(0)):
        tile = x.TileView(number // tl.cdiv(N, BLOCK), number % tl.cdiv(N, BLOCK), BLOCK, BLOCK)
        pointers, mask = c.tile_ptr(tile)
        ctx.wait(flags_ptr + number, call, "gpu")
        value = tl.load(pointers, mask=mask, cache_modifier=".cg")  # L1 may hold the tile of the last call
        for step in range(1, ctx.world_size):
            ctx.store(pointers, value, (ctx.rank + step) % ctx.world_size, mask=mask)


def launch(call):
    comm_programs = max(1, call.programs // 8)
    call.stream.wait_for_current()
    gemm_kernel[(call.programs - comm_programs,)](
        call.a, call.b, call.c, call.flags, call.number, call.words, call.m, call.n, call.k, call.block
    )
    with call.stream.as_current():
        all_scatter_kernel[(comm_programs,)](call.c, call.flags, call.number, call.words, call.m, call.n, call.block)
    call.stream.current_waits()


if __name__ == "__main__":
    main(__doc__, launch)
