"""GEMM + all-reduce with stream-K in one kernel: k is sharded over the ranks, and split over the programs of each.

All programs of a rank get as many steps of k, whichever tiles these belong to. Who begins a tile finishes it: it adds
what the programs after it have done of the tile, then sums the tile with the peers'. A program's first piece waits for
nobody, so programs wait for each other in one direction alone. No more programs than run at a time: they wait.

- python examples/kernels/stream_k_all_reduce.py --ranks 4
- torchrun --nproc-per-node 4 examples/kernels/stream_k_all_reduce.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_core import x

M, N, K = 30, 40, 100  # k of a rank
BLOCK, PROGRAMS, CALLS = 16, 5, 2


@triton.jit(do_not_specialize=["call"])
def stream_k_all_reduce_kernel(
    a_ptr, b_ptr, partial_ptr, c_ptr, pieces_ptr, done_ptr, flags_ptr, context_tensor, call, M, N, K,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum over the ranks of A @ B to every rank's C."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    partial, c = x.make_tensor_view(partial_ptr, M, N, N, 1), x.make_tensor_view(c_ptr, M, N, N, 1)
    tiles_n, steps = tl.cdiv(N, BLOCK), tl.cdiv(K, BLOCK)
    work = tl.cdiv(M, BLOCK) * tiles_n * steps
    share = tl.cdiv(work, tl.num_programs(0))
    lanes = tl.arange(0, BLOCK)
    piece = lanes[:, None] * BLOCK + lanes[None, :]
    place, stop = tl.program_id(0) * share, tl.minimum((tl.program_id(0) + 1) * share, work)
    while place < stop:
        number, first = place // steps, place % steps
        last = tl.minimum(steps, first + stop - place)
        tile = x.TileView(number // tiles_n, number % tiles_n, BLOCK, BLOCK)
        rows, columns, mask = tile.layout(M, N)
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(first, last):
            ks = step * BLOCK + lanes
            a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=(rows < M)[:, None] & (ks < K)[None, :], other=0)
            b = tl.load(
                b_ptr + ks[:, None] * N + columns[None, :], mask=(ks < K)[:, None] & (columns < N)[None, :], other=0
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        if first > 0:  # a program before this one finishes the tile
            tl.store(pieces_ptr + tl.program_id(0) * BLOCK * BLOCK + piece, total)
            iris_core.signal(done_ptr + tl.program_id(0), call, "gpu")
        else:
            other, end = tl.program_id(0) + 1, (number + 1) * steps
            while other * share < end:  # in a fixed order: the same bits in every run
                iris_core.wait(done_ptr + other, call, ctx.watchdog_ptr, "gpu")
                total += tl.load(pieces_ptr + other * BLOCK * BLOCK + piece, cache_modifier=".cg")
                other += 1
            pointers, mask = partial.tile_ptr(tile)
            tl.store(pointers, total, mask=mask)
            x.all_reduce_two_shot(tile, partial, c, ctx, flags_ptr)
        place += last - first


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    device = ctx.get_device()
    tiles = triton.cdiv(M, BLOCK) * triton.cdiv(N, BLOCK)
    partial, c = ctx.zeros(M, N), ctx.zeros(M, N)
    flags = ctx.zeros(tiles, world_size + 1, dtype=torch.int64)
    pieces, done = ctx.zeros(PROGRAMS, BLOCK, BLOCK), ctx.zeros(PROGRAMS, dtype=torch.int64)
    ctx.watchdog.watch(flags, lambda word, _: f"rank {word % (world_size + 1)} at tile {word // (world_size + 1)}")
    ctx.watchdog.watch(done, lambda program, _: f"program {program} of this rank")
    ctx.barrier()
    for call in range(1, CALLS + 1):
        generator = torch.Generator(device).manual_seed(call)  # every rank draws all shards, for the check
        a = torch.randn(world_size, M, K, generator=generator, device=device)
        b = torch.randn(world_size, K, N, generator=generator, device=device)
        stream_k_all_reduce_kernel[(PROGRAMS,)](
            a[rank].contiguous(), b[rank].contiguous(), partial, c, pieces, done, flags, ctx.get_device_context(), call,
            M, N, K, BLOCK,
        )  # fmt: skip
        expected = torch.einsum("rmk,rkn->mn", a.double(), b.double())
        torch.testing.assert_close(c.double(), expected, rtol=0, atol=1e-3)
    ctx.close()
    if rank == 0:
        return f"{tiles} tiles in {PROGRAMS} programs a rank, summed over {world_size} ranks in the same kernel"


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
