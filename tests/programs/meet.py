"""Ranks that something else started find each other, write to the next rank, and say who they are."""

import sys

import torch

import iris_core

ctx = iris_core.iris(1 << 20, device="cpu")
rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
word = ctx.full((1,), -1, dtype=torch.int64)
ctx.barrier()
ctx.peer_view(word)[(rank + 1) % world_size] = rank
ctx.device_barrier()
assert word.item() == (rank - 1) % world_size
total = torch.ones(1)
torch.distributed.all_reduce(total, group=ctx.process_group())
assert total.item() == world_size
ctx.close()
again = iris_core.iris(1 << 20, device="cpu")
assert (again.get_rank(), again.get_num_ranks()) == (rank, world_size)
again.close()
sys.stdout.write(f"rank {rank} of {world_size} has met the others\n")  # in one piece, also under torchrun's python -u
