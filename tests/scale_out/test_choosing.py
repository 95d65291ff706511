"""What is chosen over hosts: one table on all ranks, of the link as it is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from families import make_problem
from ranks import TIMEOUT_S

from iris_core import RankPool, iris
from iris_core.context.hierarchical import HierarchicalContext
from iris_core.context.hierarchical.context import NCCL_SMS
from iris_kernels.common.hierarchical import choosing
from iris_kernels.common.hierarchical.call import hierarchy_of
from iris_kernels.common.hierarchical.choosing import choose_over_hosts
from overlap_taxonomy import HOST_LINKS, MACHINES

FAMILY = "all_gather_gemm"


def choose(rank: int, world_size: int) -> dict[str, Any]:
    """Choose by rank 0's constants alone, and measure the link."""
    with iris(1 << 22) as ctx:
        assert isinstance(ctx, HierarchicalContext)
        untimed = choose_over_hosts(ctx, FAMILY, make_problem(FAMILY, 64, 64, 64, world_size, torch.bfloat16), "auto")
        ctx.kept.clear()
        machine = MACHINES["h100x1"]
        known = choosing._Known(machine, replace(HOST_LINKS["ndr"], gbps=1e-3 if rank else 200.0))
        sms = mock.patch.object(ctx.local, "get_cu_count", return_value=machine.num_sms - NCCL_SMS)
        with mock.patch.object(choosing, "_known_of", return_value=known), sms:
            products = {m: make_problem(FAMILY, m, 8192, 8192, world_size, torch.bfloat16) for m in (8192, 1)}
            chosen = {m: choose_over_hosts(ctx, FAMILY, problem, "auto").variant for m, problem in products.items()}
            by_name = choosing.schedules_for(ctx, FAMILY, hierarchy_of(FAMILY), products[8192], "copy_engine:sm90")
            fp8 = {n: make_problem(FAMILY, 1, n, 8192, world_size, torch.float8_e4m3fn) for n in (8192, 8200)}
            with mock.patch.object(torch.cuda, "is_available", return_value=True):
                in_fp8 = {n: choose_over_hosts(ctx, FAMILY, problem, "auto") for n, problem in fp8.items()}
        with mock.patch.object(choosing, "_MEASURED_BYTES", 1 << 20):
            link = choosing.measured_link(ctx)
        return {"untimed": untimed, "chosen": chosen, "chunks": by_name.chunks, "in_fp8": in_fp8, "link": link}


def test_rank_0_chooses_for_all_by_the_link_that_was_measured() -> None:
    with RankPool(2, "cpu", environment={"IRIS_TIMEOUT_S": TIMEOUT_S}, hosts=2) as pool:
        first, second = pool.call(choose)
    assert first == second
    assert first["untimed"].variant == "auto"
    assert first["chosen"] == {8192: "auto", 1: "library"}
    assert set(first["chunks"]) <= {1, 2, 4, 8}
    assert {n: choice.variant for n, choice in first["in_fp8"].items()} == {8192: "library", 8200: "auto"}
    assert "library cannot do this" in first["in_fp8"][8200].why
    assert "multiples of 16; these are 8192 and 4100" in first["in_fp8"][8200].why
    assert first["link"].gbps > 0
    assert first["link"].collective_gbps > 0
    assert first["link"].us > 0
