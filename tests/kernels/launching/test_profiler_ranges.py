"""Ranges of calls in a profiler's timeline: there if they are asked for, and of GPUs NVTX's."""

from __future__ import annotations

import pytest
import torch

import iris_core
from iris_core.utils.profiler_ranges import profiler_range
from iris_kernels.gemm_all_reduce import gemm_all_reduce


def call_everything(rank: int, world_size: int) -> list[str]:
    with iris_core.iris(1 << 22) as ctx, torch.profiler.profile() as profile:
        values = torch.ones(6, device=ctx.get_device())
        ctx.ccl.all_reduce(values)
        ctx.ccl.all_reduce(values, async_op=True).wait()
        if rank == 0:
            ctx.ccl.send(values, 1)
        else:
            ctx.ccl.recv(values, 0)
        a, b = torch.ones(6, 4), torch.ones(4, 8)
        gemm_all_reduce(ctx, a, b, variant="bulk_synchronous")
        ctx.barrier()
    return [event.name for event in profile.events() if event.name.startswith(("ccl.", "gemm"))]


@pytest.mark.parametrize("is_on", [False, True])
def test_calls_are_named_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    monkeypatch.setenv("IRIS_PROFILER_RANGES", str(int(is_on)))
    sum_of_all = "ccl.all_reduce of 6 elements of torch.float32 a part, sum"
    for rank, names in enumerate(iris_core.launch(call_everything, 2, device="cpu")):
        message = (
            f"ccl.{'recv' if rank else 'send'} of 6 elements of torch.float32 a part, {'from 0' if rank else 'to 1'}"
        )
        product = "gemm_all_reduce/bulk_synchronous:portable of 6x8x8"
        assert names == [sum_of_all, sum_of_all, message, product] * is_on


def test_on_gpus_they_are_nvtxs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_PROFILER_RANGES", "1")
    assert profiler_range(on_gpu=True) is torch.cuda.nvtx.range
