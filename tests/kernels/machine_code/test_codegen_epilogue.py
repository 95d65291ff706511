"""The machine code of kernels with an epilogue: it compiles for every target, and costs no pass over C."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiling import Case, Compiled, compile_case
from families import stem

from overlap_taxonomy import Mainloop, list_variants

EPILOGUE = ("bias", "gelu_tanh")
HOPPER = [
    Case(variant.name, "sm_90", rank=2, family=variant.family, epilogue=EPILOGUE)
    for variant in list_variants()
    if variant.mainloop is Mainloop.SM90
]
PORTABLE = [
    Case("fused_sequential:portable", target, family=family, size=1024, epilogue=EPILOGUE)
    for target, family in (
        ("sm_80", "gemm_all_scatter"),
        ("sm_90", "gemm_reduce_scatter"),
        ("sm_100", "all_gather_gemm"),
        ("gfx942", "gemm_all_reduce"),
        ("gfx950", "gemm_reduce_scatter"),
    )
]
# Where partials are added, the words that say which tile comes next do not fit beside it, and now what is computed.
MAY_SPILL = {"gemm_reduce_scatter": 64, "gemm_all_reduce": 128}


def kernel_of(case: Case) -> Compiled:
    """Return the case's kernel that ends tiles."""
    *_, kernel = [kernel for kernel in compile_case(case) if stem(case.variant) in kernel.name]
    return kernel


@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_a_hopper_kernel_finishes_tiles_in_registers(case: Case) -> None:
    kernel, plain = kernel_of(case), kernel_of(replace(case, epilogue=()))
    assert kernel.count(r"\bex2\.approx") > plain.count(r"\bex2\.approx")  # of the activation
    assert kernel.count(r"\bst\.shared") == plain.count(r"\bst\.shared")
    assert kernel.count(r"\bst\.global") == plain.count(r"\bst\.global")
    assert kernel.shared_bytes == plain.shared_bytes
    assert kernel.scratch_bytes <= MAY_SPILL.get(case.family, 0)


@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_a_portable_kernel_stores_tiles_as_wide_as_without(case: Case) -> None:
    kernel, plain = kernel_of(case), kernel_of(replace(case, epilogue=()))
    assert kernel.stores_by_file() == plain.stores_by_file()
    assert kernel.scratch_bytes <= plain.scratch_bytes
    assert kernel.code != plain.code
