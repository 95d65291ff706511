"""The first example of the Iris documentation, with its import changed; and a look at the result.

Rank 0 stores ones into rank 1's buffer. The ranks are started by torch.multiprocessing.spawn. On GPUs everything else
is the documentation's; on host memory the device and the process group are "cpu" and "gloo".
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl

import iris_core as iris


@triton.jit
def kernel(buffer, buffer_size: tl.constexpr, block_size: tl.constexpr, heap_bases_ptr):
    pid = tl.program_id(0)
    block_start = pid * block_size
    offsets = block_start + tl.arange(0, block_size)
    mask = offsets < buffer_size
    source_rank = 0
    target_rank = 1
    iris.store(buffer + offsets, 1, source_rank, target_rank, heap_bases_ptr, mask=mask)


def _worker(rank, world_size, port, device):
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", world_size=world_size, rank=rank)
    heap_size = 2**30
    iris_ctx = iris.iris(heap_size)
    cur_rank = iris_ctx.get_rank()
    buffer_size = 4096
    block_size = 1024
    buffer = iris_ctx.zeros(buffer_size, device=device, dtype=torch.float32)
    if cur_rank == 0:
        grid = lambda meta: (triton.cdiv(buffer_size, meta["block_size"]),)  # noqa: E731
        kernel[grid](buffer, buffer_size, block_size, iris_ctx.get_heap_bases())
    iris_ctx.barrier()
    expected = torch.full_like(buffer, cur_rank)
    assert torch.equal(buffer, expected), f"rank {cur_rank}: {buffer}"
    sys.stdout.write(f"rank {cur_rank} has seen {int(buffer.sum())}\n")  # in one piece, unlike print
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(_worker, args=(2, int(sys.argv[1]), sys.argv[2]), nprocs=2, join=True)
