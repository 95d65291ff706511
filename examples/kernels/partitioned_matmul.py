"""C = A @ B with all three partitioned over the ranks: the kernel names global tiles, and not where they lie.

A is partitioned by rows, B by columns, and C in blocks over a grid of ranks. Each rank computes the tiles of C whose
first element it holds, loads the tiles of A and B from whichever ranks hold them, and stores to C's owners.

- python examples/kernels/partitioned_matmul.py --ranks 4
- torchrun --nproc-per-node 4 examples/kernels/partitioned_matmul.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_core import x

M, N, K = 90, 70, 50  # sizes need not divide
BLOCK = 16


@triton.jit
def matmul_kernel(a_argument, b_argument, c_argument, context_tensor, K: tl.constexpr, BLOCK: tl.constexpr):
    """Write this rank's tiles of A @ B; programs take them in turn."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)  # knows ctx.rank and ctx.world_size
    a = x.make_partitioned_view(a_argument)
    b = x.make_partitioned_view(b_argument)
    c = x.make_partitioned_view(c_argument)
    tiles_n = tl.cdiv(c.N, BLOCK)
    for number in range(tl.program_id(0), tl.cdiv(c.M, BLOCK) * tiles_n, tl.num_programs(0)):
        tile = x.TileView(number // tiles_n, number % tiles_n, BLOCK, BLOCK)
        if c.owner(tile) == ctx.rank:
            total = tl.zeros((BLOCK, BLOCK), tl.float32)
            for step in range(tl.cdiv(K, BLOCK)):
                a_tile = a.load(x.TileView(tile.pid_m, step, BLOCK, BLOCK), ctx)
                b_tile = b.load(x.TileView(step, tile.pid_n, BLOCK, BLOCK), ctx)
                total = tl.dot(a_tile, b_tile, total)
            c.store(tile, total, ctx)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    torch.manual_seed(0)  # the same A and B on every rank, which keeps its own blocks
    whole_a, whole_b = (torch.randn(size).to(ctx.get_device(), torch.bfloat16) for size in [(M, K), (K, N)])
    a, b = x.partition(ctx, whole_a, dims=0), x.partition(ctx, whole_b, dims=1)
    c = x.partition(ctx, (M, N), dims=(0, 1))
    ctx.barrier()  # all blocks are there
    matmul_kernel[(4,)](a.argument, b.argument, c.argument, ctx.get_device_context(), K, BLOCK)
    ctx.barrier()  # all tiles are stored
    torch.testing.assert_close(c.whole(), whole_a.float() @ whole_b.float(), rtol=0, atol=1e-4)
    grid = " × ".join(map(str, c.grid))
    ctx.close()
    return f"rank {rank} holds {tuple(c.local.shape)} of C {c.shape}, of a grid of {grid} ranks"


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
