"""What tests of torch.compile share: small operators on every rank, and functions compiled by each backend."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checking import FP32_ROUNDOFF, make_data
from families import make_problem
from ranks import context

from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.common.operators.operator import Operator
from iris_kernels.gemm_all_reduce import gemm_all_reduce
from iris_kernels.gemm_all_scatter import gemm_all_scatter
from iris_kernels.gemm_reduce_scatter import gemm_reduce_scatter
from overlap_taxonomy import get_variant

DTYPE = torch.float32
SIZES = (18, 34, 16)
# In another order a sum of so many terms is off by so much; none here has more terms than C has elements.
ROUNDING = SIZES[0] * SIZES[1] * FP32_ROUNDOFF
PATTERN = "workgroup_specialized:portable"  # which every family has
HAS_COMPILER = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
if_it_compiles = pytest.mark.skipif(not HAS_COMPILER, reason="on the CPU it needs g++ and Python's headers")
each_backend = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=if_it_compiles)])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_gather_gemm": all_gather_gemm,
    "gemm_all_reduce": gemm_all_reduce,
    "gemm_all_scatter": gemm_all_scatter,
    "gemm_reduce_scatter": gemm_reduce_scatter,
}


def sizes_of(family: str, m: int, n: int, k: int) -> dict[str, int]:
    """Return the sizes of the whole that the family's function takes: of what the ranks share."""
    sizes = {"m": m, "n": n, "k": k}
    shared = {"all_gather_gemm": "mn", "gemm_all_scatter": "n"}.get(family, "k")
    return {name: sizes[name] for name in shared}


def make_operator(family: str, variant: str, world_size: int, **options: Any) -> Operator[Any]:
    """Return an operator over poisoned outputs."""
    operator = get_variant(family, variant).build(context(), make_problem(family, *SIZES, world_size, DTYPE), **options)
    poison_all(operator)
    return operator


def poison_all(operator: Operator[Any]) -> None:
    """Fill with NaN what calls overwrite; collective, as peers may be the ones that do."""
    for output in operator.outputs():
        output.fill_(float("nan"))
    context().barrier()


def are_close(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> list[bool]:
    """Return of each pair whether it differs by no more, in the norm, than the order of a sum makes; NaN does."""
    norm = torch.linalg.vector_norm
    pairs = zip(found, expected, strict=True)
    return [bool(norm(one - other) <= ROUNDING * norm(other)) for one, other in pairs]


def operands(operator: Operator[Any], seed: int = 0) -> Any:
    return make_data(operator.family, operator.problem, operator.rank, seed, operator.ctx.get_device())


def compiled(fn: Callable[..., Any], backend: Any = "aot_eager", *, whole: bool = True) -> Callable[..., Any]:
    """Return a function compiled by a backend, or by inductor in one of its modes."""
    torch._dynamo.reset()
    if backend in torch._inductor.list_mode_options():
        return torch.compile(fn, mode=backend, fullgraph=whole)
    return torch.compile(fn, backend=backend, fullgraph=whole)
