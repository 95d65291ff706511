"""A buffer that another allocator has on every rank, used by its peers without a copy.

- python examples/first_steps/engine_memory.py
- torchrun --nproc-per-node 2 examples/first_steps/engine_memory.py
"""

import torch
import torch.distributed._symmetric_memory as symm_mem
from _command_line import command_line, run

import iris_core


def allocate(shape, device):
    if device.type == "cpu":
        return torch.empty(shape).share_memory_()
    return symm_mem.empty(shape, dtype=torch.float32, device=device)


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 24)
    buffer = allocate((world_size, 64), ctx.get_device()).fill_(-1)
    symmetric = ctx.as_symmetric(buffer, copy=False)  # ValueError if its memory cannot be shared
    ctx.barrier()
    ctx.peer_view(symmetric)[:, rank] = rank  # a row in the memory of every rank
    ctx.barrier()
    assert buffer[:, 0].tolist() == list(range(world_size))  # the same memory
    ctx.free(symmetric)  # unmaps; the buffer stays
    if rank == 0:
        print(f"{world_size} ranks wrote to each other's {buffer.nbytes} bytes")
    ctx.close()


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=2).parse_args())
