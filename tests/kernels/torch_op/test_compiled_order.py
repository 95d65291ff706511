"""The order of calls in graphs of inductor, which reorders what does not depend on each other by a rank's own sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from checking import make_data
from families import make_problem
from layers import far
from ranks import Ranks, context
from torch._inductor.utils import run_and_get_code
from torch_compiling import PATTERN, if_it_compiles

from iris_kernels.gemm_all_scatter import gemm_all_scatter

pytestmark = [pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]), if_it_compiles]
DTYPE = torch.float32
SIZES = ((64, 1, 16), (8, 33, 16))  # of the first, only rank 0 has a column
FAMILY = "gemm_all_scatter"
CALL, ALL_REDUCE = f"iris_overlap.{FAMILY}", "_c10d_functional.all_reduce"


def call_between_collectives(rank: int, world_size: int) -> tuple[list[str], list[Any]]:
    """Return the order of collectives and calls in the code, none of which needs another, and what is wrong."""
    ctx, group = context(), context().process_group()
    data = [
        make_data(FAMILY, make_problem(FAMILY, *sizes, world_size, DTYPE), rank, 0, ctx.get_device()) for sizes in SIZES
    ]

    def step(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:  # products, for which nothing is compiled
        a, b, c, d, e = given
        before = functional.all_reduce(e @ e, "sum", group)
        first = gemm_all_scatter(ctx, a @ a.t() @ a, b, variant=PATTERN, n=SIZES[0][1])
        between = functional.all_reduce(e @ e.t(), "sum", group)
        second = gemm_all_scatter(ctx, c @ c.t() @ c, d, variant=PATTERN, n=SIZES[1][1])
        after = functional.all_reduce(e.t() @ e, "sum", group)
        return after, second, between @ e, first, before @ e

    given = data[0].a, data[0].b, data[1].a, data[1].b, torch.arange(64.0, device=ctx.get_device()).view(8, 8)
    torch._dynamo.reset()
    without_cache = torch._inductor.config.patch(fx_graph_cache=False)
    with torch.no_grad(), without_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        found, code = run_and_get_code(torch.compile(step, fullgraph=True), *given)
        calls = rf"{re.escape(CALL)}(?=\.default\.undispatched\()|{re.escape(ALL_REDUCE)}(?=_?\.default\()"
        order = re.findall(rf"torch\.ops\.({calls})", "\n".join(code))
        wrong = far(found, step(*given))
    ctx.release_operators()
    return order, wrong


def test_calls_and_functional_collectives_keep_the_order_of_the_program(ranks: Callable[[int], Ranks]) -> None:
    """Ranks that queue them in different orders wait for each other for ever; here no rank has the other's sizes."""
    order = [ALL_REDUCE, CALL, ALL_REDUCE, CALL, ALL_REDUCE]
    assert ranks(2).call(call_between_collectives) == [(order, [])] * 2
