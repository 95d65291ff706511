"""GEMM + all-reduce with a bias, an activation, and an op of one's own, all in the kernel's epilogue.

- python examples/models/epilogue_op.py --ranks 2
- torchrun --nproc-per-node 2 examples/models/epilogue_op.py
"""

import torch
import triton
import triton.language as tl
from _command_line import command_line, run

import iris_core
from iris_kernels.common.device.epilogue import EpilogueOp, column_values, register_epilogue_op
from iris_kernels.gemm_all_reduce import Problem
from overlap_taxonomy import get_variant

M, N, K = 64, 96, 128


@triton.jit
def clamp(acc, rows, cols, bounds):
    """Bound each column by its element of a vector."""
    return tl.minimum(acc, column_values(bounds, cols))


register_epilogue_op(EpilogueOp("clamp", clamp, lambda c, bounds: c.minimum(bounds.to(c.dtype)), operand="bounds"))


def body(rank, world_size):
    with iris_core.iris(heap_size=16 << 20) as ctx:
        problem = Problem(M, N, K, world_size, torch.float16, epilogue=("bias", "silu", "clamp"))
        operator = get_variant("gemm_all_reduce", "auto").build(ctx, problem)
        torch.manual_seed(0)  # the same on every rank
        device = ctx.get_device()
        a, b, bias, bounds = (
            torch.randn(*shape, dtype=torch.float32).to(device, torch.float16) for shape in ((M, K), (K, N), (N,), (N,))
        )
        own_a, own_b = (one.chunk(world_size, dim)[rank] for one, dim in ((a, 1), (b, 0)))
        c = operator(own_a, own_b, bias=bias, bounds=bounds)
        expected = torch.nn.functional.silu(a.float() @ b.float() + bias.float()).minimum(bounds.float())
        error = (c.float() - expected).norm() / expected.norm()
        assert error < 2e-3, error  # half of fp16's eps, and the partial sums'
        ctx.barrier()  # nobody failed
        if rank == 0:
            print(f"min(silu(A @ B + bias), bounds) by {operator.variant} on {world_size} ranks, off by {error:.1e}")


if __name__ == "__main__":
    run(body, command_line(__doc__).parse_args())
