"""An all-reduce inside the kernel that computes what is reduced: the mean of all ranks' gradients, a tile at a time.

Each rank has a batch of its own. The gradient of a linear layer's weight is ``x.T @ dy`` of the batch, and training in
data parallelism wants the mean over the ranks. A program computes a tile of this rank's gradient, and the all-reduce of
a tile sums it with the peers': no second kernel, and while some tiles travel others are computed.

- python examples/kernels/gradient_all_reduce.py --ranks 4
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_core import x

TOKENS, INPUTS, OUTPUTS = 64, 80, 96  # of a rank's batch, and of the layer
BLOCK = 32
STEPS = 3


@triton.jit(do_not_specialize=["rank"])
def mean_gradient_kernel(
    x_ptr,
    dy_ptr,
    partial_ptr,
    gradient_ptr,
    flags_ptr,
    rank,
    heap_bases,
    watchdog_ptr,
    WORLD_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the mean over the ranks of ``x.T @ dy``; a program per tile."""
    tiles_n = tl.cdiv(OUTPUTS, BLOCK)
    tile = x.TileView(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, BLOCK, BLOCK)
    rows, columns, mask = tile.layout(INPUTS, OUTPUTS)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, TOKENS, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        a = tl.load(x_ptr + tokens[None, :] * INPUTS + rows[:, None], mask=rows[:, None] < INPUTS, other=0)
        b = tl.load(dy_ptr + tokens[:, None] * OUTPUTS + columns[None, :], mask=columns[None, :] < OUTPUTS, other=0)
        total = tl.dot(a, b, total)
    ctx = iris_core.DeviceContext(rank, WORLD_SIZE, heap_bases, watchdog_ptr)
    partial = x.make_tensor_view(partial_ptr, INPUTS, OUTPUTS, OUTPUTS, 1)
    gradient = x.make_tensor_view(gradient_ptr, INPUTS, OUTPUTS, OUTPUTS, 1)
    pointers, mask = partial.tile_ptr(tile)
    tl.store(pointers, total / WORLD_SIZE, mask=mask)
    x.all_reduce_two_shot(tile, partial, gradient, ctx, flags_ptr)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    device = ctx.get_device()
    num_tiles = triton.cdiv(INPUTS, BLOCK) * triton.cdiv(OUTPUTS, BLOCK)
    partial, gradient = ctx.zeros(INPUTS, OUTPUTS), ctx.zeros(INPUTS, OUTPUTS)
    flags = ctx.zeros(num_tiles, world_size + 1, dtype=torch.int64)
    # Should a wait pass its limit, the error says for what.
    ctx.watchdog.watch(flags, lambda word, _: f"rank {word % (world_size + 1)} at tile {word // (world_size + 1)}")
    ctx.barrier()
    for step in range(STEPS):
        # Every rank draws all batches, and takes its own: the others are for the check.
        generator = torch.Generator(device).manual_seed(step)
        batches = torch.randn(world_size, TOKENS, INPUTS, generator=generator, device=device)
        gradients = torch.randn(world_size, TOKENS, OUTPUTS, generator=generator, device=device)
        mean_gradient_kernel[(num_tiles,)](
            batches[rank].contiguous(),
            gradients[rank].contiguous(),
            partial,
            gradient,
            flags,
            rank,
            ctx.get_heap_bases(),
            ctx.get_watchdog(),
            world_size,
            TOKENS,
            INPUTS,
            OUTPUTS,
            BLOCK,
        )
        expected = torch.einsum("rti,rto->io", batches.double(), gradients.double()) / world_size
        # TF32 on GPUs rounds operands to 11 bits.
        torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=4e-2 if device.type == "cuda" else 1e-4)
        if rank == 0:
            print(f"step {step}: the mean gradient of {world_size} ranks, {num_tiles} tiles in one kernel")
    ctx.barrier()
    ctx.close()


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
