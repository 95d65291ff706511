"""What norming rows costs counts in choices: a kernel behind most variants, little where rows are added."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import Measured, key_of
from iris_kernels.common.choice.ranking import Ranking, work_of
from iris_kernels.common.portable.row_norm import RmsNorm
from iris_kernels.gemm_all_reduce import Problem
from overlap_taxonomy import machine_for, module_of, predict_us

GPU = "NVIDIA H100 80GB HBM3"
STREAM_K, SM90 = "fused_sequential:portable:stream_k", "warp_specialized:sm90"
PLAIN = Problem(256, 4096, 4096, 2, torch.bfloat16)
NORMED = replace(PLAIN, norm=RmsNorm(1e-6))


@pytest.mark.parametrize(("family", "rows"), [("gemm_all_reduce", 256), ("gemm_reduce_scatter", 128)])
def test_a_kernel_is_counted_where_there_is_one(family: str, rows: int) -> None:
    machine = machine_for(GPU, 2)
    assert machine is not None
    problem = module_of(family).Problem(256, 4096, 4096, 2, torch.bfloat16)
    plain, normed = work_of(family, problem), work_of(family, replace(problem, norm=RmsNorm(1e-6)))
    nbytes = rows * 4096 * 2
    added = {STREAM_K: nbytes / machine.sum_gbps / 1e3}
    for name in ("library", SM90, STREAM_K):
        us = predict_us(machine, name, normed) - predict_us(machine, name, plain)
        assert us == pytest.approx(added.get(name, machine.launch_us + 2 * nbytes / machine.memory_gbps / 1e3))


def test_measured_times_without_a_norm_are_taken_as_with_it() -> None:
    """One that is a little slower is chosen, as it needs no kernel more."""
    times = {"library": 60.0, SM90: 30.0, STREAM_K: 31.5}
    known = Knowledge(GPU, {key_of("gemm_all_reduce", PLAIN): Measured(times)}, {})
    chosen = [
        Ranking(known, "gemm_all_reduce", problem, list(times), is_here=False).of(256) for problem in (PLAIN, NORMED)
    ]
    assert [(one.variant, one.why) for one in chosen] == [(SM90, "measured here"), (STREAM_K, "measured here")]
