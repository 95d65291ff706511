"""Default configurations on NVIDIA GPUs that nobody has run: that they fit, and multiply on the matrix units.

Some have less shared memory than an H200, and none of these has its way to multiply from there.
"""

from __future__ import annotations

import pytest
import torch
from compiling import TARGETS, Case, compile_case
from families import FUSED, name

from overlap_taxonomy import Variant


@pytest.mark.parametrize(  # the widest tiles; and those of 64 columns, where there is least room
    ("target", "size"), [("sm_80", 8192), ("sm_89", 8192), ("sm_89", 1024), ("sm_120", 8192)]
)
@pytest.mark.parametrize("variant", FUSED, ids=name)
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
