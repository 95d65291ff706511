"""The machine code of fp8 products: by fp8 instructions on every target, without spills, promoted where asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_kernel import Compiled
from compiling import NVIDIA_ACQUIRE, Case, compile_case
from families import stem

from overlap_taxonomy import Mainloop, list_variants

E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
ROWS, BLOCKS, TENSOR = ("row", "column"), ("block", "block"), ("tensor", "tensor")
# A target, what it multiplies, and the instruction by which it does.
PORTABLE = [
    ("sm_89", E4M3, r"mma\.sync\.\S*e4m3\.e4m3"),
    ("sm_90", E4M3, r"wgmma\.mma_async\S*e4m3\.e4m3"),
    ("sm_100", E4M3, r"tcgen05\.mma\S*kind::f8f6f4"),
    ("gfx942", FNUZ, r"v_mfma_f32_\w*fp8_fp8"),
    ("gfx950", E4M3, r"v_mfma_f32_\w*f8f6f4"),
]
SM90 = [(one.family, one.name) for one in list_variants() if one.mainloop is Mainloop.SM90]
MAY_SPILL = {128: 40, 256: 208}  # of a thread, once a tile, by its columns: 256 take 128 registers


@pytest.mark.parametrize("scales", [ROWS, BLOCKS], ids="-".join)
@pytest.mark.parametrize(("target", "dtype", "instruction"), PORTABLE, ids=[one[0] for one in PORTABLE])
def test_the_portable_main_loop_multiplies_fp8(
    target: str, dtype: torch.dtype, instruction: str, scales: tuple[str, ...]
) -> None:
    case = Case("fused_sequential:portable", target, 1, dtype, family="gemm_reduce_scatter", scales=scales, size=4096)
    (kernel,) = compile_case(case)
    assert kernel.count(instruction)
    assert kernel.scratch_bytes <= (16 if target == "sm_89" else 0)


@pytest.mark.parametrize("scales", [ROWS, TENSOR], ids="-".join)
@pytest.mark.parametrize(("family", "variant"), SM90, ids=lambda name: name)
def test_sm90_promotes_the_product_of_a_step_while_it_multiplies_the_next(
    family: str, variant: str, scales: tuple[str, ...]
) -> None:
    rank = 1 if scales == TENSOR else 2  # Triton makes a constant of a 1
    check_main_loop(compile_fp8(family, variant, rank, scales=scales), products=2, adds="FADD", still_multiplied=1)


@pytest.mark.parametrize("block_n", [128, 256])
@pytest.mark.parametrize(("family", "variant"), SM90, ids=lambda name: name)
def test_sm90_scales_blocks_while_the_other_group_multiplies(family: str, variant: str, block_n: int) -> None:
    kernel = compile_fp8(family, variant, 2, scales=BLOCKS, block_n=block_n)
    assert block_n == kernel.constants["TILE"].BLOCK_N
    loop = check_main_loop(kernel, products=block_n // 128, adds="FFMA", still_multiplied=0)
    check_that_groups_meet_while_they_multiply(loop)


def check_main_loop(kernel: Compiled, *, products: int, adds: str, still_multiplied: int) -> list[str]:
    """Return the instructions of a main loop, which has so many products of 128 columns.

    Args:
        kernel: the kernel.
        products: of four instructions each; each is added by as many instructions as a thread has elements of it.
        adds: the instruction.
        still_multiplied: products that are not waited for when one is added.
    """
    (loop,) = kernel.main_loops()
    assert [name for name in loop if "GMMA" in name] == 4 * products * ["QGMMA.64x128x32.F32.E4M3.E4M3"]
    assert sum(name.startswith(adds) for name in loop) == 64 * products
    assert not any(name.startswith(("STL", "LDL")) for name in loop)
    waits = [name for name in loop if name.startswith("WARPGROUP.DEPBAR")]
    assert waits == products * [f"WARPGROUP.DEPBAR.LE {still_multiplied}"]
    assert kernel.scratch_bytes <= MAY_SPILL[kernel.constants["TILE"].BLOCK_N]
    return loop


def check_that_groups_meet_while_they_multiply(loop: list[str]) -> None:
    """Check that no barrier of both warp groups lies between the wait for a product and the begin of the next one."""
    last = ""
    for name in loop + loop:
        if "GMMA" in name or name.startswith("WARPGROUP.DEPBAR"):
            last = name
        assert not (name.startswith("BAR.") and last.startswith("WARPGROUP.DEPBAR"))


def compile_fp8(family: str, variant: str, rank: int, **how: Any) -> Compiled:
    """Return the variant's own kernel of those that a call launches."""
    kernels = compile_case(Case(variant, "sm_90", rank, E4M3, family=family, **how))
    (kernel,) = [one for one in kernels if one.name.endswith(f"_{stem(variant)}")]
    return kernel


@pytest.mark.parametrize(("family", "variant"), SM90, ids=lambda name: name)
def test_sm90_leaves_sums_in_the_accumulators_where_asked(family: str, variant: str) -> None:
    kernel = compile_fp8(family, variant, 2, scales=ROWS, use_fast_accum=True, size=4096)
    assert kernel.count(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3") == 4


@pytest.mark.parametrize("size", [1, 128])
@pytest.mark.parametrize(("family", "variant"), SM90, ids=lambda name: name)
def test_sm90_compiles_where_strides_are_one(family: str, variant: str, size: int) -> None:
    """Triton makes constants of such arguments, also within a bundle of a bundle, up to its GPU dialect."""
    case = Case(variant, "sm_90", 0, E4M3, family=family, scales=BLOCKS, size=size, world_size=1)
    for kernel in compile_case(case) + compile_case(replace(case, scales=ROWS)):
        assert kernel.ttgir_alone(), kernel.name


@pytest.mark.parametrize("variant", [one.name for one in list_variants("all_gather_gemm") if one.has_kernels])
@pytest.mark.parametrize(("target", "dtype"), [("sm_90", E4M3), ("gfx942", FNUZ)], ids=["sm_90", "gfx942"])
def test_a_shard_is_quantised_ahead_of_the_kernels_of_fp8(variant: str, target: str, dtype: torch.dtype) -> None:
    """By one kernel, with wide stores and without spills; the others are those of A in fp8."""
    if variant.endswith(":sm90") and target != "sm_90":
        pytest.skip("it is for sm_90")
    plain = Case(variant, target, 1, dtype, family="all_gather_gemm", scales=ROWS, out_dtype=torch.bfloat16, size=4096)
    quantise, *kernels = compile_case(replace(plain, given=torch.bfloat16))
    assert quantise.name == "quantise_rows"
    assert quantise.scratch_bytes == 0
    assert max(quantise.stores_by_file()["quantise.py"]) >= 8
    expected = compile_case(plain)
    assert [one.name for one in kernels] == [one.name for one in expected]
    if target == "sm_90":  # on AMD GPUs buffer instructions reach memory of the operator that is small enough
        assert [one.code for one in kernels] == [one.code for one in expected]


@pytest.mark.parametrize("variant", ["workgroup_specialized:portable", "producer_consumer:portable"])
def test_scales_are_awaited_with_their_rows(variant: str) -> None:
    """An fp8 tile waits as often as one of bf16: once."""
    fp8 = Case(variant, "sm_90", 1, E4M3, family="all_gather_gemm", scales=ROWS, size=4096)
    plain = replace(fp8, dtype=torch.bfloat16, scales=())
    waits = [[kernel.count(NVIDIA_ACQUIRE.format("sys")) for kernel in compile_case(case)] for case in (fp8, plain)]
    assert waits[0] == waits[1]
