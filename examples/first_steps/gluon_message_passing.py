"""The relay of message_passing.py as a kernel in Gluon: the context object carries the ranks, the kernel the layout.

Gluon is not interpreted: this needs GPUs, and without them it says so.

- python examples/first_steps/gluon_message_passing.py --ranks 4
"""

import torch
from _command_line import command_line, run
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris_core
from iris_core.gluon import IrisDeviceCtx

CHUNKS = 8
CHUNK_SIZE = 256
ROUNDS = 3
NUM_WARPS = 4


@gluon.jit(do_not_specialize=["round_number"])
def relay_kernel(
    message, flags, round_number, context_tensor, CHUNKS: gl.constexpr, CHUNK_SIZE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Turn each chunk x into 3 * x + rank, and pass it on; one program per rank."""
    ctx = IrisDeviceCtx.initialize(context_tensor)
    next_rank = (ctx.rank + 1) % ctx.world_size
    for chunk in range(CHUNKS):
        offsets = chunk * CHUNK_SIZE + gl.arange(0, CHUNK_SIZE, LAYOUT)
        if ctx.rank > 0:
            ctx.wait(flags + chunk, round_number)
        value = 3 * gl.load(message + offsets) + ctx.rank
        ctx.store(message + offsets, value, next_rank)
        ctx.signal(flags + chunk, round_number, next_rank)
    if ctx.rank == 0:
        for chunk in range(CHUNKS):
            ctx.wait(flags + chunk, round_number)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    if ctx.is_interpreted():
        ctx.close()
        return "Gluon kernels are compiled for GPUs, and there are none here" if rank == 0 else None
    message = ctx.zeros(CHUNKS * CHUNK_SIZE, dtype=torch.int64)
    flags = ctx.zeros(CHUNKS, dtype=torch.int64)
    # Should a wait pass its limit, the error says for what.
    ctx.watchdog.watch(flags, lambda chunk, rank: f"chunk {chunk} from rank {(rank - 1) % world_size}")
    layout = gl.BlockedLayout([2], [64 if torch.version.hip else 32], [NUM_WARPS], [0])
    ctx.barrier()
    for round_number in range(1, ROUNDS + 1):
        sent = torch.arange(len(message)) + 100 * round_number
        if rank == 0:
            message.copy_(sent)
        relay_kernel[(1,)](
            message, flags, round_number, ctx.get_device_context(), CHUNKS, CHUNK_SIZE, layout, num_warps=NUM_WARPS
        )
        if rank == 0:
            expected = sent
            for visited in range(world_size):
                expected = 3 * expected + visited
            assert torch.equal(message.cpu(), expected), f"round {round_number}: {message[:4].tolist()} …"
    ctx.close()
    return f"{len(message)} numbers went round {world_size} ranks, {ROUNDS} times" if rank == 0 else None


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
