"""The machine code of kernels with an epilogue: it compiles for every target, and costs no pass over C."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from compiled_kernel import Compiled
from compiling import Case, compile_case
from families import stem

from overlap_taxonomy import Mainloop, list_families, list_variants

ACTIVATED, ADDED = ("bias", "gelu_tanh"), ("scale", "bias", "residual")
# With something of each that is in the code of none without: tanh, and the elements of a matrix.
EPILOGUES = {ACTIVATED: r"\btanh\.approx", ADDED: r"\bld\.global"}
GATED = [
    Case(variant.name, "sm_90", rank=2, family=variant.family, epilogue=("bias", "swiglu"))
    for variant in list_variants("all_gather_gemm")
    if variant.mainloop is Mainloop.SM90
]
HOPPER = [
    Case(variant.name, "sm_90", rank=2, family=variant.family, epilogue=epilogue)
    for variant in list_variants()
    if variant.mainloop is Mainloop.SM90
    for epilogue in EPILOGUES
]
PORTABLE = [
    Case("workgroup_specialized:portable", target, family=family, size=1024, epilogue=epilogue)
    for target, family, epilogue in (
        ("sm_80", "all_gather_gemm", ACTIVATED),
        ("sm_90", "gemm_reduce_scatter", ADDED),
        ("sm_100", "gemm_all_scatter", ACTIVATED),
        ("gfx942", "gemm_all_reduce", ADDED),
        ("gfx950", "gemm_reduce_scatter", ACTIVATED),
    )
]
# Where partials are added, the words that say which tile comes next do not fit beside it, and now what is computed. A
# whole tile of 256 columns has a residual's elements, and those of two vectors, on their way at the same time.
MAY_SPILL = {"gemm_reduce_scatter": 128, "gemm_all_reduce": 128}
MAY_SPILL_READING = MAY_SPILL | {"all_gather_gemm": 288}


def kernel_of(case: Case) -> Compiled:
    """Return the case's kernel that ends tiles."""
    *_, kernel = [kernel for kernel in compile_case(case) if stem(case.variant) in kernel.name]
    return kernel


@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_a_hopper_kernel_finishes_tiles_in_registers(case: Case) -> None:
    kernel, plain = kernel_of(case), kernel_of(replace(case, epilogue=()))
    assert kernel.count(EPILOGUES[case.epilogue]) > plain.count(EPILOGUES[case.epilogue])
    assert not kernel.count(r"\bex2\.approx|\bdiv\.full")  # of two special functions an element
    # Through shared memory goes a vector's element of each column, one a thread, if anything.
    vectors = 0 if "residual" in case.epilogue else 1
    assert kernel.count(r"\bst\.shared") <= plain.count(r"\bst\.shared") + vectors
    assert kernel.count(r"\bst\.global") == plain.count(r"\bst\.global")
    assert kernel.shared_bytes <= plain.shared_bytes + 4 * kernel.config.block_n * vectors
    may_spill = MAY_SPILL_READING if "residual" in case.epilogue else MAY_SPILL
    assert kernel.scratch_bytes <= may_spill.get(case.family, 0)


@pytest.mark.parametrize("case", [case for case in HOPPER if "residual" not in case.epilogue], ids=str)
def test_a_bias_is_loaded_once_while_a_tile_is_multiplied(case: Case) -> None:
    kernel = kernel_of(case)
    (load,) = re.finditer(r"\bld\.global\.b16\b", kernel.code)
    first, *_, last = re.finditer(r"\bwgmma\.mma_async\b", kernel.code)
    assert first.start() < load.start() < last.start()


@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_a_portable_kernel_stores_tiles_as_wide_as_without(case: Case) -> None:
    kernel, plain = kernel_of(case), kernel_of(replace(case, epilogue=()))
    assert kernel.stores_by_file() == plain.stores_by_file()
    assert kernel.scratch_bytes <= plain.scratch_bytes
    assert kernel.code != plain.code


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("family", list_families())
def test_a_c_of_fp32_is_stored_sixteen_bytes_at_a_time(family: str, target: str) -> None:
    case = Case("workgroup_specialized:portable", target, family=family, size=1024, out_dtype=torch.float32)
    kernel, plain = kernel_of(case), kernel_of(replace(case, out_dtype=None))
    wide, narrow = (one.stores_by_file()["gemm.py"] for one in (kernel, plain))
    assert set(wide) == {16}
    assert wide.total() * 16 == 2 * sum(width * count for width, count in narrow.items())
    assert kernel.scratch_bytes <= MAY_SPILL.get(family, 0)


@pytest.mark.parametrize("case", GATED, ids=str)
def test_a_gated_activation_stages_half_a_tile(case: Case) -> None:
    kernel, plain = kernel_of(case), kernel_of(replace(case, epilogue=()))
    assert kernel.config.block_n == plain.config.block_n
    tile_bytes = 2 * kernel.config.block_m * kernel.config.block_n
    of_columns = 4 * kernel.config.block_n  # of the bias
    assert tile_bytes // 2 - of_columns <= plain.shared_bytes - kernel.shared_bytes <= tile_bytes // 2
    assert kernel.count(r"\btanh\.approx") > plain.count(r"\btanh\.approx")
    assert kernel.count(r"\bst\.global") == plain.count(r"\bst\.global")
    assert kernel.scratch_bytes == 0


# Floating-point instructions an element, of which the special function unit's take as long as eight others.
INSTRUCTIONS = {"bias": 1, "relu": 1, "gelu": 8, "gelu_tanh": 6, "silu": 3, "swiglu": 2}
_FLOAT = r"\b(?:fma|mul|add|sub|max|min|tanh|ex2|div|rcp|setp|selp|neg|abs)\.[\w.]*f32\b"


@pytest.mark.parametrize("op", INSTRUCTIONS)
def test_an_op_takes_few_instructions_an_element(op: str) -> None:
    case = Case("copy_engine:sm90", "sm_90", family="all_gather_gemm", size=4096, world_size=2, epilogue=(op,))
    kernel, plain = kernel_of(case), kernel_of(replace(case, epilogue=()))
    elements = kernel.config.block_m * kernel.config.block_n // kernel.threads
    assert kernel.count(_FLOAT) - plain.count(_FLOAT) <= INSTRUCTIONS[op] * elements
    assert kernel.count(r"\btanh\.approx") <= elements
