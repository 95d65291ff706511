"""Kernels that are compiled for any M: the fastest variants multiply as they do for an M divisible by 16."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiling import Case, compile_case

from overlap_taxonomy import Mainloop, Schedule, Variant, list_variants

FASTEST = [one for one in list_variants() if one.mainloop is Mainloop.SM90 or one.schedule is Schedule.STREAM_K]


@pytest.mark.parametrize("variant", FASTEST, ids=lambda variant: f"{variant.family}-{variant.name}")
def test_a_kernel_for_any_rows_has_the_loops_of_one_for_divisible_ones(variant: Variant) -> None:
    case = Case(variant.name, "sm_90", family=variant.family, world_size=2, size=1024)
    divisible, any_rows = (compile_case(replace(case, rows=rows)) for rows in (1024, 1021))
    loops = [kernel.main_loops() for kernel in any_rows]
    assert any(loops)
    assert loops == [kernel.main_loops() for kernel in divisible]
    assert not any(kernel.scratch_bytes for kernel in any_rows)
