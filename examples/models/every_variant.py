"""Every variant of every family, called three times on fresh data and checked against torch.

- python examples/models/every_variant.py --ranks 4
- python examples/models/every_variant.py --family all_gather_gemm --ranks 2
- python examples/models/every_variant.py --ranks 2 --shape 100 90 70 (sizes need not divide anything)
- torchrun --nproc-per-node 4 examples/models/every_variant.py

It prints no times: without a GPU they mean nothing, and with one `make sweep` takes them properly.
"""

import torch
from _command_line import command_line, run

import iris_core
from iris_kernels import all_gather_gemm, gemm_all_reduce, gemm_all_scatter, gemm_reduce_scatter
from overlap_taxonomy import list_variants

MODULES = (gemm_all_scatter, all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce)
FAMILIES = {family.FAMILY: family for family in MODULES}
CALLS = 3
TOLERANCE = 1e-2  # relative, over all elements; one rounding to bf16 makes about 2e-3


def worst_error(ctx, variant, problem):
    """Return the largest relative error of a variant's calls on this rank."""
    operator = variant.build(ctx, problem)
    errors = []
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(call)  # the same A and B on every rank, others at each call
        a = torch.randn(problem.m, problem.k, generator=generator).to(ctx.get_device(), problem.dtype)
        b = torch.randn(problem.k, problem.n, generator=generator).to(ctx.get_device(), problem.dtype)
        # The output is the operator's: read before the next call, which overwrites it.
        c = operator.as_matrix(operator(*problem.shards(ctx.get_rank(), a, b)))
        expected = FAMILIES[variant.family].reference(problem, ctx.get_rank(), a, b)
        norm = expected.norm().clamp(min=1e-30)  # a rank may have no rows or columns
        errors.append(((c.to(expected.dtype) - expected).norm() / norm).item())
    operator.close()
    return max(errors)


def body(rank, world_size, families, shape):
    ctx = iris_core.iris(heap_size=1 << 28)
    if shape is None:
        shape = (96, 128, 64) if ctx.is_interpreted() else (4096, 4096, 4096)
    for family in families:
        problem = FAMILIES[family].Problem(*shape, world_size, torch.bfloat16)
        lines = [f"{family}, M, N, K = {tuple(shape)}, bf16, {world_size} ranks on {ctx.get_device().type}"]
        for variant in list_variants(family):
            reason = variant.unsupported_reason(problem, None)
            if reason:
                lines.append(f"  {variant.name:<36} not run: {reason}")
                continue
            error = max(ctx.control_plane.all_gather(worst_error(ctx, variant, problem)))
            assert error < TOLERANCE, f"{family}/{variant.name}: relative error {error}"
            lines.append(f"  {variant.name:<36} relative error {error:.1e}")
        if rank == 0:
            print(*lines, sep="\n")
    ctx.close()


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--family", choices=list(FAMILIES), action="append", help="default: all; may be repeated")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "N", "K"))
    arguments = parser.parse_args()
    run(body, arguments, arguments.family or list(FAMILIES), arguments.shape)
