"""What ranks on several hosts cannot do is refused by name, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import make_problem
from ranks import TIMEOUT_S, raised

from iris_core import RankPool, iris, launch
from overlap_taxonomy import get_variant


def refusals(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """Ask for what is refused; return what was raised."""
    with iris(1 << 24) as ctx:
        problem: Any = make_problem("all_gather_gemm", 16, 16, 16, world_size, torch.bfloat16)
        build = get_variant("all_gather_gemm", "auto").build
        operator = build(ctx, problem)
        a, b = (torch.ones(shape(rank), dtype=torch.bfloat16) for shape in (problem.a_shape, problem.b_shape))
        baseline = get_variant("all_gather_gemm", "async_tp")
        found = {
            "baseline": raised(baseline.build, ctx, problem),
            "heap": raised(ctx.zeros, 3),
            "bases": raised(ctx.get_heap_bases),
            "grow": raised(ctx.grow, 1 << 21),
            "sleep": raised(ctx.sleep),
            "ccl": raised(lambda: ctx.ccl),
            "reset": raised(ctx.reset),
            "ranks": raised(build, ctx, make_problem("all_gather_gemm", 16, 16, 16, 3, torch.bfloat16)),
            "sizes": raised(build, ctx, make_problem("all_gather_gemm", 16 + 2 * rank, 16, 16, world_size, a.dtype)),
            "dtype": raised(operator, a.float(), b),
            "rows": raised(operator, torch.ones(9, 16, dtype=a.dtype), b),
            "operand": raised(operator, a, b, bias=b[0]),
        }
        operator(a, b)  # and the context is as it was
        operator.close()
        found["closed"] = raised(operator, a, b)
        return found


def test_what_is_refused_is_named() -> None:
    with RankPool(2, "cpu", environment={"IRIS_TIMEOUT_S": TIMEOUT_S}, hosts=2) as pool:
        for found in pool.call(refusals):
            assert found["heap"] == found["bases"] == found["grow"] == found["sleep"] == found["ccl"]
            said = {
                "baseline": ("ValueError", "it is for ranks of one host, and these live on 2; variants with kernels"),
                "heap": ("RuntimeError", "2 hosts have no heap in common; that of this host's ranks is ctx.local's"),
                "reset": ("RuntimeError", "cannot be reset"),
                "ranks": ("ValueError", "the problem is for 3 ranks, the context has 2"),
                "sizes": ("ValueError", "what the ranks ask for must be the same on all ranks"),
                "dtype": ("ValueError", "A is torch.float32; the operator was made for torch.bfloat16"),
                "rows": ("ValueError", "A is (9, 16) on rank"),
                "operand": ("ValueError", "the operands are A, B, bias; it takes A, B"),
                "closed": ("RuntimeError", "was closed; make another"),
            }
            for what, (kind, words) in said.items():
                assert found[what][0] == kind, (what, found[what])
                assert words in found[what][1], (what, found[what])


@pytest.mark.parametrize("hosts", [0, 3, 1.5])
def test_hosts_divide_the_ranks(hosts: Any) -> None:
    with pytest.raises(ValueError, match=r"hosts is .*; it takes a number that divides the 4 ranks"):
        launch(refusals, 4, "cpu", hosts=hosts)
