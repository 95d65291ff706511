"""Default configurations on NVIDIA GPUs that nobody has run: that they fit, and multiply on the matrix units.

Some have less shared memory than an H200, and none of these has its way to multiply from there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiling import TARGETS, Case, StubContext, compile_case, make_problem
from families import FUSED, name

from overlap_taxonomy import Mainloop, Variant, list_families

STREAM_K = [variant for variant in FUSED if variant.name.endswith(":stream_k")]  # splits go by the number of SMs
# Variants with each of the tiles that there are in a family on sm_89 and, for fp32, on sm_120.
EACH_TILE = ("bulk_synchronous:portable", "workgroup_specialized:portable", "fused_sequential:portable:stream_k")
# The widest tiles, of all variants; and those of 64 columns. Both GPUs have as much room and take the same tiles,
# sm_120 by descriptors; one variant a family has the widest by pointers, too.
WHERE = [
    *((variant, "sm_120", 8192) for variant in FUSED if variant.mainloop is not Mainloop.LIBRARY),
    *((variant, "sm_89", 1024) for variant in FUSED if variant.name in EACH_TILE),
    *((variant, "sm_89", 8192) for variant in FUSED if variant.name == "fused_sequential:portable"),
    *((variant, "sm_80", 8192) for variant in STREAM_K),
]


@pytest.mark.parametrize("variant", [variant for variant in FUSED if variant not in STREAM_K], ids=name)
def test_an_a100_has_what_fits_where_there_is_less_room(variant: Variant) -> None:
    config_of = {}
    for target in ("sm_80", "sm_89"):
        case = Case(variant.name, target, rank=1, family=variant.family)
        config = variant.build(StubContext(case), make_problem(case)).config
        config_of[target] = replace(config, num_sms=1, comm_sms=1)
    assert config_of["sm_80"] == config_of["sm_89"]


@pytest.mark.parametrize(
    ("variant", "target", "size"), WHERE, ids=lambda it: name(it) if isinstance(it, Variant) else it
)
def test_a_default_configuration_fits(variant: Variant, target: str, size: int) -> None:
    multiplying = 0
    for kernel in compile_case(Case(variant.name, target, rank=1, family=variant.family, size=size)):
        assert kernel.shared_bytes <= TARGETS[target].shared_bytes, kernel.name
        assert kernel.scratch_bytes <= 48, kernel.name
        multiplying += kernel.count(r"mma\.sync\.aligned") >= 4
    assert multiplying


@pytest.mark.parametrize(
    ("target", "size", "dtype"), [("sm_89", 1024, torch.bfloat16), ("sm_120", 8192, torch.float32)], ids=str
)
@pytest.mark.parametrize("family", list_families())
def test_other_variants_take_the_tiles_of_those_compiled(
    family: str, target: str, size: int, dtype: torch.dtype
) -> None:
    tiles: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
    for variant in (one for one in FUSED if one.family == family):
        case = Case(variant.name, target, rank=1, family=family, size=size, dtype=dtype)
        config = variant.build(StubContext(case), make_problem(case)).config
        tile = (config.block_m, config.block_n, config.block_k, config.num_stages, config.num_warps)
        tiles[variant.name in EACH_TILE].add(tile)
    assert tiles[False] <= tiles[True]


@pytest.mark.parametrize("variant", [variant for variant in FUSED if variant.name in EACH_TILE], ids=name)
def test_exact_products_fit(variant: Variant) -> None:
    for kernel in compile_case(Case(variant.name, "sm_120", family=variant.family, dtype=torch.float32)):
        assert kernel.shared_bytes <= TARGETS["sm_120"].shared_bytes, kernel.name
