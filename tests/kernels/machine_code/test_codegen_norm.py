"""The machine code of kernels that norm rows: it compiles for every target, and costs no pass over C of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiling import Case, compile_case

from iris_kernels.common.portable.row_norm import RmsNorm

FP8 = {"sm_90": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
FUSED = [
    ("gemm_all_reduce", "fused_sequential:portable:stream_k"),
    ("gemm_reduce_scatter", "fused_sequential:portable:stream_k"),
]
BEHIND = [("gemm_all_reduce", "workgroup_specialized:portable"), ("gemm_reduce_scatter", "fused_sequential:portable")]


def case_of(family: str, variant: str, target: str, dtype: Any, size: int = 8192) -> Case:
    """Return a case with a residual and a norm, to its own dtype or to the target's fp8."""
    norm = RmsNorm(1e-6, FP8[target] if dtype else None)
    return Case(variant, target, rank=2, family=family, size=size, epilogue=("residual",), norm=norm)


@pytest.mark.parametrize("to_fp8", [False, True])
@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize(("family", "variant"), FUSED)
def test_what_adds_rows_norms_them(family: str, variant: str, target: str, to_fp8: bool) -> None:
    case = case_of(family, variant, target, to_fp8)
    (kernel,), (plain,) = compile_case(case), compile_case(replace(case, norm=None))
    assert {16} == set(kernel.stores_by_file()["row_norm.py"]) - ({8, 4} if to_fp8 else set())
    assert kernel.scratch_bytes <= plain.scratch_bytes
    assert kernel.shared_bytes <= plain.shared_bytes


@pytest.mark.parametrize("size", [8192, 16384])
@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize(("family", "variant"), BEHIND)
def test_another_kernel_norms_rows_behind_others(family: str, variant: str, target: str, size: int) -> None:
    *_, norm = compile_case(case_of(family, variant, target, False, size))
    assert norm.name == "norm_rows"
    assert set(norm.stores_by_file()["row_norm.py"]) == {16}
    assert norm.scratch_bytes == 0
