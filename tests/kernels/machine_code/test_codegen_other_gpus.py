"""Default configurations on NVIDIA GPUs that nobody has run: that they fit, and multiply on the matrix units.

Some have less shared memory than an H200, and none of these has its way to multiply from there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiling import TARGETS, Case, StubContext, compile_case, make_problem
from families import FUSED, name

from overlap_taxonomy import Variant

STREAM_K = [variant for variant in FUSED if variant.name.endswith(":stream_k")]  # splits go by the number of SMs
# The widest tiles; and those of 64 columns, where there is least room. Both GPUs have as much and take the same tiles,
# sm_120 by descriptors; one variant a family has the widest by pointers, too.
WHERE = [
    *((variant, *where) for variant in FUSED for where in (("sm_89", 1024), ("sm_120", 8192))),
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


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_exact_products_fit(variant: Variant) -> None:
    for kernel in compile_case(Case(variant.name, "sm_120", family=variant.family, dtype=torch.float32)):
        assert kernel.shared_bytes <= TARGETS["sm_120"].shared_bytes, kernel.name
