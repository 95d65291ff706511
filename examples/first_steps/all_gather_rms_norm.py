"""A first fused kernel: shards of rows go round a ring of ranks, and each is normalised as it passes.

docs/tutorials/first_fused_kernel.md goes through it step by step.

| flag | written by | awaited by |
|---|---|---|
| flags[owner, block] of a rank | the rank before it, after that block of the owner's shard | that rank |

Flags hold the number of the call and are never reset.

- python examples/first_steps/all_gather_rms_norm.py --ranks 4
- python examples/first_steps/all_gather_rms_norm.py --check
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_core.checker import check

ROWS, WIDTH, BLOCK = 6, 32, 4  # of a rank's shard; rows of a program
CALLS = 3


@triton.jit
def rms_norm(rows, weight, WIDTH: tl.constexpr):
    """Return rows over their root mean square, times the weight."""
    mean_square = tl.sum(rows * rows, axis=1) / WIDTH
    return rows * tl.rsqrt(mean_square + 1e-6)[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["call"])
def all_gather_rms_norm_kernel(
    gathered_ptr, weight_ptr, out_ptr, flags_ptr, call, context_tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass each rank's shard on to the next rank, and write its norm; one program per block of rows of every shard."""
    ctx = iris_core.DeviceContext.initialize(context_tensor)
    next_rank = (ctx.rank + 1) % ctx.world_size
    rows, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    mask = (rows < ROWS)[:, None]
    weight = tl.load(weight_ptr + columns)
    for step in range(ctx.world_size):
        owner = (ctx.rank - step + ctx.world_size) % ctx.world_size
        offsets = (owner * ROWS + rows)[:, None] * WIDTH + columns[None, :]
        flag = flags_ptr + owner * tl.num_programs(0) + tl.program_id(0)
        if step > 0:
            ctx.wait(flag, call)
        value = tl.load(gathered_ptr + offsets, mask=mask, other=0, cache_modifier=".cg")
        if step < ctx.world_size - 1:
            ctx.store(gathered_ptr + offsets, value, next_rank, mask=mask)
            ctx.signal(flag, call, next_rank)
        tl.store(out_ptr + offsets, rms_norm(value, weight, WIDTH), mask=mask)


def body(rank, world_size, buffers=2):
    ctx = iris_core.iris(heap_size=1 << 20)
    device, words = ctx.get_device(), ctx.get_device_context()
    blocks = triton.cdiv(ROWS, BLOCK)
    gathered = ctx.zeros(buffers, world_size, ROWS, WIDTH)  # calls take turns between the buffers
    flags = ctx.zeros(world_size, blocks, dtype=torch.int64)
    # Should a wait pass its limit, the error says for what.
    ctx.watchdog.watch(flags, lambda word, _: f"block {word % blocks} of rank {word // blocks}'s shard")
    ctx.barrier()
    for call in range(1, CALLS + 1):
        generator = torch.Generator(device).manual_seed(call)  # every rank draws all shards, for the check
        shards = torch.randn(world_size, ROWS, WIDTH, generator=generator, device=device)
        weight = torch.rand(WIDTH, generator=generator, device=device)
        out = torch.empty(world_size, ROWS, WIDTH, device=device)
        buffer = gathered[call % buffers]
        buffer[rank] = shards[rank]
        all_gather_rms_norm_kernel[(blocks,)](buffer, weight, out, flags, call, words, ROWS, WIDTH, BLOCK)
        expected = torch.nn.functional.rms_norm(shards, (WIDTH,), weight, eps=1e-6)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    ctx.close()
    return f"{world_size} shards of {ROWS} rows gathered and normalised, {CALLS} times" if rank == 0 else None


if __name__ == "__main__":
    parser = command_line(__doc__, ranks=4)
    parser.add_argument("--check", action="store_true", help="for races, with one buffer and with two; needs no GPU")
    arguments = parser.parse_args()
    if arguments.check:
        for buffers in (1, 2):
            report = check(body, world_size=3, args=(buffers,), schedules=4, seed=0)
            print(f"buffers: {buffers}\n{report}")
    else:
        run(body, arguments)
