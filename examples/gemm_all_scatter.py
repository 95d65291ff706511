"""Every variant of GEMM + all-scatter, called three times on fresh data and checked against torch.

- python examples/gemm_all_scatter.py --ranks 4
- python examples/gemm_all_scatter.py --ranks 2 --shape 100 90 70 (sizes need not divide anything)
- torchrun --nproc-per-node 4 examples/gemm_all_scatter.py

It prints no times: without a GPU they mean nothing, and with one `make sweep` takes them properly.
"""

import argparse
import os

import torch
from rich.console import Console
from rich.table import Table

import iris_core
from iris_kernels.gemm_all_scatter import Problem, reference
from overlap_taxonomy import list_variants

CALLS = 3
TOLERANCE = 1e-2  # relative, over all elements; one rounding to bf16 makes about 2e-3


def worst_error(ctx, variant, problem):
    """Return the largest relative error of a variant's calls on this rank."""
    operator = variant.build(ctx, problem)
    start, stop = problem.columns(ctx.get_rank())
    errors = []
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(call)  # the same A and B on every rank, others at each call
        a = torch.randn(problem.m, problem.k, generator=generator).to(ctx.get_device(), problem.dtype)
        b = torch.randn(problem.k, problem.n, generator=generator).to(ctx.get_device(), problem.dtype)
        # The output is the operator's: read before the next call, which overwrites it.
        c = operator.as_matrix(operator(a, b[:, start:stop]))
        expected = reference(a, b)
        errors.append(((c.to(expected.dtype) - expected).norm() / expected.norm()).item())
    operator.close()
    return max(errors)


def body(rank, world_size, shape):
    ctx = iris_core.iris(heap_size=1 << 28)
    if shape is None:
        shape = (96, 128, 64) if ctx.is_interpreted() else (4096, 4096, 4096)
    problem = Problem(*shape, world_size, torch.bfloat16)
    table = Table("variant", "who communicates", "relative error")
    table.title = f"M, N, K = {tuple(shape)}, bf16, {world_size} ranks on {ctx.get_device().type}"
    for variant in list_variants("gemm_all_scatter"):
        error = max(ctx.group.all_gather(worst_error(ctx, variant, problem)))
        assert error < TOLERANCE, f"{variant.name}: relative error {error}"
        table.add_row(variant.name, variant.agent.value, f"{error:.1e}")
    if rank == 0:
        Console().print(table)
    ctx.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "N", "K"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # under torchrun
        body(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.shape)
    else:
        iris_core.launch(body, arguments.ranks, device=arguments.device, args=(arguments.shape,))
