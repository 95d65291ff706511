"""Every rank stores into the memory of the next, from inside a Triton kernel.

- python examples/first_steps/remote_store.py --ranks 4
- torchrun --nproc-per-node 4 examples/first_steps/remote_store.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core

SIZE = 4096
BLOCK = 1024


@triton.jit(do_not_specialize=["rank"])
def store_kernel(buffer, rank, world_size, heap_bases, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store 1000 * rank + index into the next rank's buffer."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    next_rank = (rank + 1) % world_size
    # `buffer` is this rank's; the same buffer of another rank is named by its rank alone.
    iris_core.store(buffer + offsets, 1000 * rank + offsets, rank, next_rank, heap_bases, mask=offsets < SIZE)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 20)
    buffer = ctx.zeros(SIZE, dtype=torch.int32)  # at the same offset of every rank's heap
    ctx.barrier()  # every rank's buffer is zero before anyone stores
    grid = (triton.cdiv(SIZE, BLOCK),)
    store_kernel[grid](buffer, rank, world_size, ctx.get_heap_bases(), SIZE, BLOCK)
    ctx.barrier()  # every rank's kernel has ended
    previous = (rank - 1) % world_size
    expected = 1000 * previous + torch.arange(SIZE, dtype=torch.int32)
    assert torch.equal(buffer.cpu(), expected), f"rank {rank} has {buffer[:4].tolist()} …"
    ctx.barrier()  # nobody failed
    if rank == 0:
        print(f"each of {world_size} ranks received {SIZE} numbers; rank 0 has {buffer[:3].tolist()} …")
    ctx.close()


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
