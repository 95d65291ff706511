"""A message goes round all ranks, a chunk at a time, in one kernel per rank: remote stores, signals and waits.

Rank 0 sends a chunk to rank 1, which changes it and sends it on, and so round to rank 0. Chunks are pipelined: while
rank 1 changes the second, rank 2 changes the first. A flag per chunk signals it to the next rank.

| flag | written by | awaited by |
|---|---|---|
| flags[chunk] of a rank | the rank before it, after the chunk's data | that rank, before it reads the chunk |

Flags hold the number of the round and are never reset. Nor is a "ready" needed before a buffer is overwritten: a chunk
that is back at rank 0 has been read by everyone, and only then does rank 0 begin the next round.

- python examples/first_steps/message_passing.py --ranks 4
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core

CHUNKS = 8
CHUNK_SIZE = 256
ROUNDS = 3


@triton.jit(do_not_specialize=["rank", "round_number"])
def relay_kernel(
    message,
    flags,
    round_number,
    rank,
    world_size,
    heap_bases,
    watchdog,
    CHUNKS: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
):
    """Turn each chunk x into 3 * x + rank, and pass it on; one program per rank."""
    next_rank = (rank + 1) % world_size
    for chunk in range(CHUNKS):
        offsets = chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
        if rank > 0:
            iris_core.wait(flags + chunk, round_number, watchdog)
        value = 3 * tl.load(message + offsets) + rank
        iris_core.store(message + offsets, value, rank, next_rank, heap_bases)
        iris_core.signal(iris_core.translate(flags + chunk, rank, next_rank, heap_bases), round_number)
    if rank == 0:
        for chunk in range(CHUNKS):
            iris_core.wait(flags + chunk, round_number, watchdog)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    message = ctx.zeros(CHUNKS * CHUNK_SIZE, dtype=torch.int64)
    flags = ctx.zeros(CHUNKS, dtype=torch.int64)
    # Should a wait pass its limit, the error says for what.
    ctx.watchdog.watch(flags, lambda chunk, rank: f"chunk {chunk} from rank {(rank - 1) % world_size}")
    ctx.barrier()
    for round_number in range(1, ROUNDS + 1):
        sent = torch.arange(len(message)) + 100 * round_number
        if rank == 0:
            message.copy_(sent)
        relay_kernel[(1,)](
            message,
            flags,
            round_number,
            rank,
            world_size,
            ctx.get_heap_bases(),
            ctx.get_watchdog(),
            CHUNKS,
            CHUNK_SIZE,
        )
        if rank == 0:
            expected = sent
            for visited in range(world_size):
                expected = 3 * expected + visited
            assert torch.equal(message.cpu(), expected), f"round {round_number}: {message[:4].tolist()} …"
            print(f"round {round_number}: {len(message)} numbers went round {world_size} ranks")
    ctx.barrier()
    ctx.close()


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
