"""GEMM + all-scatter, workgroup-specialised: of the programs of one grid, some compute tiles and some store them.

| flag | written by | awaited by |
|---|---|---|
| one per tile, holding the number of the call | the computing program, after the tile | the storing program |

- python examples/patterns/workgroup_specialized.py --ranks 4
"""

import triton
import triton.language as tl
from _harness import main
from persistent_gemm import multiply_tile

import iris_core
from iris_core import x


@triton.jit(do_not_specialize=["call", "gemm_programs"])
def gemm_kernel(
    a_ptr, b_ptr, c_ptr, flags_ptr, call, gemm_programs, context_tensor, M, N, K, BLOCK: tl.constexpr
):  # fmt: skip
    """Write this rank's block of C on all ranks; programs of a kind take tiles in turn."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    c = x.make_tensor_view(c_ptr + ctx.rank * N, M, N, ctx.world_size * N, 1)
    computes = tl.program_id(0) < gemm_programs
    first = tl.program_id(0) if computes else tl.program_id(0) - gemm_programs
    programs = gemm_programs if computes else tl.num_programs(0) - gemm_programs
    for number in range(first, c.number_of_tiles(BLOCK, BLOCK), programs):
        tile = x.TileView(number // tl.cdiv(N, BLOCK), number % tl.cdiv(N, BLOCK), BLOCK, BLOCK)
        pointers, mask = c.tile_ptr(tile)
        if computes:
            value = multiply_tile(a_ptr, b_ptr, tile, M, N, K, BLOCK).to(c_ptr.dtype.element_ty)
            tl.store(pointers, value, mask=mask)
            iris_core.signal(flags_ptr + number, call, "gpu")
        else:
            ctx.wait(flags_ptr + number, call, "gpu")
            value = tl.load(pointers, mask=mask, cache_modifier=".cg")  # L1 may hold the tile of the last call
            for step in range(1, ctx.world_size):
                ctx.store(pointers, value, (ctx.rank + step) % ctx.world_size, mask=mask)


def launch(call):
    gemm_programs = call.programs - max(1, call.programs // 8)
    gemm_kernel[(call.programs,)](
        call.a, call.b, call.c, call.flags, call.number, gemm_programs, call.words, call.m, call.n, call.k, call.block
    )


if __name__ == "__main__":
    main(__doc__, launch)
