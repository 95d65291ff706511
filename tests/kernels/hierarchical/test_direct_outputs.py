"""What a host's ranks multiply goes where the operator over hosts wants it, directly where kernels can store there."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from compiling import make_problem
from driving import SIZE, build, case_of, driven, flat, operands
from families import name

from iris_kernels.common.hierarchical.call import HierarchicalCall
from overlap_taxonomy import Variant, list_variants

FUSED = [variant for variant in list_variants() if variant.has_kernels]


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_c_goes_to_a_matrix_of_its_shape(variant: Variant, is_ragged: bool) -> None:
    """Kernels have its address, unless peers write C, or there must be room beside it; then it is copied there."""
    case = case_of(variant)
    if is_ragged:
        if variant.name == "warp_specialized:sm90" and variant.family == "gemm_all_scatter":
            pytest.skip("it takes columns that begin on 16 bytes on every rank")
        case = replace(case, size=SIZE + 6)
    problem = make_problem(case)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx, new_outputs=True)
        call = HierarchicalCall(mock.Mock(), problem, case.family, variant.name, None, {}, 1)
        out = torch.zeros(problem.c_shape(case.rank), dtype=torch.bfloat16)
        with mock.patch.object(HierarchicalCall, "operator", return_value=operator):
            c, *_ = call.multiply(problem, *operands(case), out=out)
        launched = [one for entry in log.take() for one in flat(entry)]
    assert c.data_ptr() == out.data_ptr()
    assert c.shape == out.shape
    if not is_ragged:
        assert (out.data_ptr() in launched) == (not operator.keeps_outputs)
