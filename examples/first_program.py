"""C = A @ B on two ranks: each multiplies by half of B's columns, and both end up with the whole of C."""

import torch

import iris_core
from iris_kernels.gemm_all_scatter import gemm_all_scatter


def body(rank, world_size):
    ctx = iris_core.iris(heap_size=1 << 24)
    generator = torch.Generator().manual_seed(0)  # the same A and B on every rank
    a = torch.randn(64, 96, generator=generator).to(ctx.get_device(), torch.bfloat16)
    b = torch.randn(96, 128, generator=generator).to(ctx.get_device(), torch.bfloat16)
    own_columns = b.chunk(world_size, dim=1)[rank]
    c = gemm_all_scatter(ctx, a, own_columns, variant="workgroup_specialized")
    expected = a.float() @ b.float()
    error = ((c.float() - expected).norm() / expected.norm()).item()
    ctx.close()
    return f"rank {rank}: C is {tuple(c.shape)}, relative error {error:.1e}"


if __name__ == "__main__":
    print(*iris_core.launch(body, world_size=2), sep="\n")
