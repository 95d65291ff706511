"""Pipeline parallelism in one kernel per rank: each rank is a layer, and micro-batches go from rank to rank.

A stage receives a micro-batch, multiplies it by its weights, and sends the result on, while the stage before works on
the next one.

- python examples/kernels/pipeline_stages.py --ranks 4
- torchrun --nproc-per-node 4 examples/kernels/pipeline_stages.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_core import x

MICRO_BATCHES, TOKENS, WIDTH = 5, 16, 32
CALLS = 2


@triton.jit
def stage_kernel(
    input_ptr, weight_ptr, received_ptr, output_ptr, channels_ptr, context_tensor, MICRO_BATCHES: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Apply this rank's layer, relu(x @ weight), to all micro-batches; one program per rank."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    received = x.make_tensor_view(received_ptr, MICRO_BATCHES * TOKENS, WIDTH, WIDTH, 1)
    output = x.make_tensor_view(output_ptr, MICRO_BATCHES * TOKENS, WIDTH, WIDTH, 1)
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns[:, None] * WIDTH + columns[None, :])
    for number in range(MICRO_BATCHES):
        tile = x.TileView(number, 0, TOKENS, WIDTH)
        from_ptr = input_ptr
        if ctx.rank > 0:
            x.recv(tile, received, ctx.rank - 1, ctx, channels_ptr)
            from_ptr = received_ptr
        pointers, mask = x.make_tensor_view(from_ptr, MICRO_BATCHES * TOKENS, WIDTH, WIDTH, 1).tile_ptr(tile)
        value = tl.load(pointers, mask=mask, cache_modifier=".cg")
        pointers, mask = output.tile_ptr(tile)
        tl.store(pointers, tl.maximum(tl.dot(value, weight, input_precision="ieee"), 0), mask=mask)
        if ctx.rank < ctx.world_size - 1:
            x.send(tile, output, received, ctx.rank + 1, ctx, channels_ptr)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    device = ctx.get_device()
    received, output = (ctx.zeros(MICRO_BATCHES, TOKENS, WIDTH) for _ in range(2))
    channels = ctx.zeros(MICRO_BATCHES, 4, dtype=torch.int64)  # a tile's: two flags, two counts
    ctx.watchdog.watch(channels, lambda word, _: f"micro-batch {word // 4}")
    ctx.barrier()
    for call in range(CALLS):
        generator = torch.Generator(device).manual_seed(call)  # every rank draws all layers, for the check
        given = torch.randn(MICRO_BATCHES, TOKENS, WIDTH, generator=generator, device=device)
        weights = torch.randn(world_size, WIDTH, WIDTH, generator=generator, device=device) / WIDTH**0.5
        stage_kernel[(1,)](
            given, weights[rank].contiguous(), received, output, channels, ctx.get_device_context(), MICRO_BATCHES,
            TOKENS, WIDTH,
        )  # fmt: skip
        expected = given
        for weight in weights[: rank + 1]:
            expected = (expected @ weight).relu()
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-4)
    ctx.close()
    if rank == 0:
        return f"{MICRO_BATCHES} micro-batches went through {world_size} stages, {CALLS} times"


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
