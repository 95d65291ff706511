"""In machine-independent code: nothing that a peer stored is read before the wait for it.

With one step of k, the main loop is gone before Triton's pipeliner looks, which would then pipeline the loop over tiles
and move its loads above its waits.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from compiled_kernel import Compiled
from compiling import PAST_L1, Case, StubContext, compile_kernel, recorded_launches

from overlap_taxonomy import get_variant

SUMMING = (
    "producer_consumer:portable",
    "fused_sequential:portable",
    "workgroup_specialized:portable",
    "copy_engine:portable",
)


def compile_one_step(family: str, variant: str, dtype: torch.dtype) -> list[Compiled]:
    """Compile the kernels of a problem of which every rank has one step of k."""
    case = Case(variant, "sm_90", rank=0, dtype=dtype, family=family, size=256)
    k = case.world_size if family == "gemm_reduce_scatter" else 1
    problem = importlib.import_module(f"iris_kernels.{family}").Problem(256, 256, k, case.world_size, dtype)
    with recorded_launches() as launches:
        operator: Any = get_variant(family, variant).build(StubContext(case), problem)
        k, n = problem.b_shape(case.rank)
        operator(torch.empty(problem.a_shape(case.rank), dtype=dtype), torch.empty(n, k, dtype=dtype).t())
    return [compile_kernel(kernel, arguments, case.target) for kernel, arguments in launches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", SUMMING)
def test_partials_are_read_after_the_wait_for_them(variant: str, dtype: torch.dtype) -> None:
    checked = 0
    for kernel in compile_one_step("gemm_reduce_scatter", variant, dtype):
        acquired = False
        for line in kernel.ttgir_alone().splitlines():
            acquired |= "ld.acquire." in line
            if re.search(PAST_L1, line):  # how a peer's partial, or another program's, is read
                checked += 1
                assert acquired, kernel.name
    assert checked


@pytest.mark.parametrize(
    "variant", ["producer_consumer:portable", "workgroup_specialized:portable", "copy_engine:portable"]
)
def test_the_loop_over_tiles_is_not_pipelined(variant: str) -> None:
    for kernel in compile_one_step("all_gather_gemm", variant, torch.float32):
        assert "async_copy_global_to_local" not in kernel.ttgir_alone(), kernel.name
