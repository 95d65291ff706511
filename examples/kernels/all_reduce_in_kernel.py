"""One kernel, five all-reduce algorithms: a program computes a tile and sums it with the peers' before it ends.

What a kernel gives is the same but for rounding: `atomic` and `spinlock` add in no fixed order, and to zeroed outputs.

- python examples/kernels/all_reduce_in_kernel.py --ranks 4
- torchrun --nproc-per-node 4 examples/kernels/all_reduce_in_kernel.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_core import x

ALGORITHMS = ("one_shot", "two_shot", "ring", "atomic", "spinlock")
M, N, BLOCK = 20, 24, 16


@triton.jit
def sum_kernel(
    partial_ptr, total_ptr, flags_ptr, locks_ptr, context_tensor, M, N, BLOCK: tl.constexpr, ALGORITHM: tl.constexpr
):
    """Write the sum over the ranks of (rank + 1) * (row + column); a program per tile."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    tiles_n = tl.cdiv(N, BLOCK)
    tile = x.TileView(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, BLOCK, BLOCK)
    partial, total = x.make_tensor_view(partial_ptr, M, N, N, 1), x.make_tensor_view(total_ptr, M, N, N, 1)
    rows, columns = tile.indices()
    pointers, mask = partial.tile_ptr(tile)
    tl.store(pointers, (ctx.rank + 1) * (rows[:, None] + columns[None, :]).to(tl.float32), mask=mask)
    if ALGORITHM == "one_shot":  # each rank loads all tiles
        x.all_reduce_one_shot(tile, partial, total, ctx, flags_ptr)
    elif ALGORITHM == "two_shot":  # a tile's owner loads all, and stores the sum to all
        x.all_reduce_two_shot(tile, partial, total, ctx, flags_ptr)
    elif ALGORITHM == "ring":  # from neighbour to neighbour
        x.all_reduce_ring(tile, partial, total, ctx, flags_ptr)
    elif ALGORITHM == "atomic":  # each rank adds to all outputs
        x.all_reduce_atomic(tile, partial, total, ctx, flags_ptr)
    else:  # the same, for dtypes without atomics
        x.all_reduce_spinlock(tile, partial, total, locks_ptr, ctx, flags_ptr)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    tiles = triton.cdiv(M, BLOCK) * triton.cdiv(N, BLOCK)
    partial, total = ctx.zeros(M, N), ctx.zeros(M, N)
    flags, locks = ctx.zeros(tiles, world_size + 1, dtype=torch.int64), ctx.zeros(tiles, 2, dtype=torch.int64)
    # Should a wait pass its limit, the error says for what.
    ctx.watchdog.watch(flags, lambda word, _: f"rank {word % (world_size + 1)} at tile {word // (world_size + 1)}")
    ctx.watchdog.watch(locks, lambda word, _: f"the lock of tile {word // 2}")
    summands = torch.arange(M)[:, None] + torch.arange(N)[None, :]
    expected = (world_size * (world_size + 1) // 2 * summands).float()
    for algorithm in ALGORITHMS:
        total.zero_()  # for those that add to it
        ctx.barrier()
        sum_kernel[(tiles,)](
            partial, total, flags, locks, ctx.get_device_context(), M, N, BLOCK=BLOCK, ALGORITHM=algorithm
        )
        assert torch.equal(total.cpu(), expected), f"rank {rank}: {algorithm}"  # small integers: no rounding
    ctx.close()
    return f"rank {rank}: the sum of {world_size} ranks by {', '.join(ALGORITHMS)}" if rank == 0 else None


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
