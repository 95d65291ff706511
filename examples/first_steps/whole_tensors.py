"""Collectives on whole tensors: a sum, a gather, and a maximum of the first and the last rank.

- python examples/first_steps/whole_tensors.py --ranks 4
- torchrun --nproc-per-node 4 examples/first_steps/whole_tensors.py
"""

import torch
from _command_line import command_line, run

import iris_core

ROWS, COLUMNS = 6, 5


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 28)
    device = ctx.get_device()
    gradient = torch.full((ROWS, COLUMNS), rank + 1.0, device=device)
    shard = torch.full((ROWS, COLUMNS), float(rank), device=device)
    gathered = torch.empty(world_size * ROWS, COLUMNS, device=device)
    largest = torch.empty_like(shard)
    ctx.ccl.all_reduce(gradient)  # in place
    ctx.ccl.all_gather(gathered, shard)
    ends = ctx.ccl.new_group(sorted({0, world_size - 1}))  # on all ranks
    if rank in ends.ranks:
        work = ctx.ccl.all_reduce(largest, shard, op="max", group=ends, async_op=True)
        work.wait()  # the current stream waits, the host does not
        assert (largest == world_size - 1).all()
    assert (gradient == world_size * (world_size + 1) / 2).all()
    assert torch.equal(gathered.view(world_size, -1)[:, 0].cpu(), torch.arange(world_size).float())
    if rank == 0:
        print(f"{world_size} ranks: summed {gradient.numel()} elements, gathered {gathered.numel()}")
    ctx.close()


if __name__ == "__main__":
    run(body, command_line(__doc__, ranks=4).parse_args())
