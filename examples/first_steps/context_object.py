"""A message goes down the line of ranks, by a context object: every rank but the first doubles it, and passes it on.

The object holds the rank, the number of ranks, the addresses of all heaps and the watchdog, so a call names the data
and the peer alone. message_passing.py does the like with the loose functions.

| flag | written by | awaited by |
|---|---|---|
| flag of a rank | the rank before it, after the message | that rank, before it reads the message |

The flag holds the number of the round and is never reset.

- python examples/first_steps/context_object.py --ranks 4
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core

SIZE = 512
ROUNDS = 3


@triton.jit(do_not_specialize=["rank", "round_number"])
def pass_on_kernel(context_tensor, message, flag, round_number, rank, world_size, SIZE: tl.constexpr):
    """Double the message, but on rank 0, and store it to the next rank; one program per rank."""
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size)
    offsets = tl.arange(0, SIZE)
    if rank == 0:
        value = tl.load(message + offsets)
    else:
        ctx.wait(flag, round_number)
        value = 2 * tl.load(message + offsets)
    if rank < world_size - 1:
        ctx.store(message + offsets, value, rank + 1)
        ctx.signal(flag, round_number, rank + 1)
    else:
        tl.store(message + offsets, value)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    message = ctx.zeros(SIZE, dtype=torch.int64)
    flag = ctx.zeros(1, dtype=torch.int64)
    ctx.watchdog.watch(flag, lambda _, rank: f"the message from rank {rank - 1}")  # for the error of a late wait
    for round_number in range(1, ROUNDS + 1):
        sent = torch.arange(SIZE) + 100 * round_number
        if rank == 0:
            message.copy_(sent)
        ctx.barrier()  # nobody overwrites a message that is still read
        pass_on_kernel[(1,)](ctx.get_device_context(), message, flag, round_number, rank, world_size, SIZE)
        if rank == world_size - 1:
            expected = sent * 2 ** (world_size - 1)
            assert torch.equal(message.cpu(), expected), f"round {round_number}: {message[:4].tolist()} …"
            print(f"round {round_number}: {SIZE} numbers went down a line of {world_size} ranks")
    ctx.barrier()
    ctx.close()


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
