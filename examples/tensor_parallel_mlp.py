"""Two layers cut over all ranks, as in Megatron's sequence parallelism, trained: gradients as without ranks.

The first layer's weights are cut by columns, the second's by rows, the tokens by rows. So the way in is an all-gather
and a GEMM, the way out a GEMM and a reduce-scatter; and backwards each is the other.

- python examples/tensor_parallel_mlp.py --ranks 4
- torchrun --nproc-per-node 4 examples/tensor_parallel_mlp.py
"""

import argparse
import os

import torch

import iris_core
from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.gemm_reduce_scatter import gemm_reduce_scatter

STEPS = 2
TOLERANCE = 2e-2  # relative, over all elements of a gradient; each is rounded to bf16 at every layer


class ColumnParallel(torch.autograd.Function):
    """x (m/W, k) and weight (k, f/W) of every rank to (m, f/W): all tokens, this rank's features."""

    @staticmethod
    def forward(ctx, x, weight, heap):
        y, gathered = all_gather_gemm(heap, x, weight, variant="auto", return_gathered=True)
        # Both are the operator's, and the next call with such shapes overwrites them.
        ctx.save_for_backward(gathered.clone(), weight)
        ctx.heap = heap
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        gathered, weight = ctx.saved_tensors
        grad_x = gemm_reduce_scatter(ctx.heap, grad, weight.t(), variant="auto").clone()
        return grad_x, gathered.t() @ grad, None


class RowParallel(torch.autograd.Function):
    """x (m, f/W) and weight (f/W, n) of every rank to (m/W, n): this rank's tokens, summed over all features."""

    @staticmethod
    def forward(ctx, x, weight, heap):
        ctx.save_for_backward(x, weight)
        ctx.heap = heap
        return gemm_reduce_scatter(heap, x, weight, variant="auto").clone()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, gathered = all_gather_gemm(ctx.heap, grad, weight.t(), variant="auto", return_gathered=True)
        return grad_x.clone(), x.t() @ gathered, None


def gradients(x, first, second, grad, layers):
    """Return the gradients of x and both weights."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, first, second)]
    into, out_of = layers
    out_of(torch.relu(into(leaves[0], leaves[1])), leaves[2]).backward(grad)
    return [leaf.grad for leaf in leaves]


def body(rank, world_size):
    heap = iris_core.iris(heap_size=1 << 28)
    tokens, width, features = (64, 48, 96) if heap.is_interpreted() else (4096, 4096, 16384)
    errors = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)  # the same on every rank, other data at each step

        def draw(rows, columns, generator=generator):
            values = torch.randn(rows, columns, generator=generator) / rows**0.5
            return values.to(heap.get_device(), torch.bfloat16)

        x, grad = draw(tokens, width), draw(tokens, width)
        first, second = draw(width, features), draw(features, width)

        def own(tensor, dim):
            return tensor.chunk(world_size, dim)[rank]

        parts = own(x, 0), own(first, 1), own(second, 0), own(grad, 0)
        layers = (lambda x, w: ColumnParallel.apply(x, w, heap), lambda x, w: RowParallel.apply(x, w, heap))
        found = gradients(*parts, layers)
        whole = gradients(*(tensor.float() for tensor in (x, first, second, grad)), (torch.mm, torch.mm))
        for of, one, expected, dim in zip(("x", "first", "second"), found, whole, (0, 1, 0), strict=True):
            expected = own(expected, dim)
            error = ((one.float() - expected).norm() / expected.norm()).item()
            assert error < TOLERANCE, f"gradient of {of}, rank {rank}, step {step}: relative error {error}"
            errors.append(error)
    heap.close()
    return f"rank {rank}: gradients of {STEPS} steps, largest relative error {max(errors):.1e}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # under torchrun
        print(body(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    else:
        print(*iris_core.launch(body, arguments.ranks, device=arguments.device), sep="\n")
