"""Kernels compile where sizes and strides are 1: Triton makes constants of such arguments, up to its GPU dialect."""

from __future__ import annotations

import pytest
from compiling import Case, compile_case
from families import FAMILIES, FUSED

from overlap_taxonomy import Mainloop, Variant

EPILOGUE = ("scale", "bias", "residual")


@pytest.mark.parametrize("size", [1, 2])  # of two: a row and a column on each of two ranks
@pytest.mark.parametrize("variant", FUSED, ids=lambda variant: f"{variant.family}-{variant.name}")
def test_kernels_compile(variant: Variant, size: int) -> None:
    is_library = variant.mainloop is Mainloop.LIBRARY  # which has no epilogue where the product is C
    epilogue = () if is_library and not FAMILIES[variant.family].sums_partials else EPILOGUE
    case = Case(variant.name, "sm_90", family=variant.family, world_size=2, size=size, epilogue=epilogue)
    for kernel in compile_case(case):
        assert kernel.ttgir_alone(), kernel.name
