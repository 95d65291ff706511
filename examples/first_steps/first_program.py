"""C = A @ B on two ranks: each multiplies by half of B's columns, and both end up with the whole of C."""

import torch

import iris_core
from iris_kernels.gemm_all_scatter import gemm_all_scatter


def body(rank, world_size):
    torch.manual_seed(0)  # the same A and B on every rank
    with iris_core.iris(heap_size=1 << 24) as ctx:
        a, b = (torch.randn(size).to(ctx.get_device(), torch.bfloat16) for size in [(64, 96), (96, 128)])
        c = gemm_all_scatter(ctx, a, b.chunk(world_size, dim=1)[rank], variant="workgroup_specialized")
        error = (c - a.float() @ b.float()).norm() / c.norm()
        return f"rank {rank}: C is {tuple(c.shape)}, relative error {error:.1e}"


if __name__ == "__main__":
    print(*iris_core.launch(body, world_size=2), sep="\n")
