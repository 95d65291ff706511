"""How much of the heap operators on demand take for any number of rows, on a GPU that is not there."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext

from iris_core.context import context
from iris_kernels import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from iris_kernels.common.choice import auto
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.operators.product import Product
from iris_kernels.common.operators.torch_op import operators_for

RANKS, MOST = 2, 8192
PRODUCTS = {  # of Llama-3-8B's layers: n and k
    all_gather_gemm.FAMILY: (6144, 4096),
    gemm_reduce_scatter.FAMILY: (4096, 14336),
    gemm_all_reduce.FAMILY: (4096, 4096),
}


def heap_and_variants(family: str, rows: list[int]) -> tuple[int, Counter[str]]:
    """Return what calls with these numbers of rows take of the heap in bytes, and how often each variant is made."""
    ctx: Any = StubContext(Case("fused_sequential:portable", "sm_90", rank=0, world_size=RANKS), 1 << 30)
    ctx.name = "no GPU"
    ctx.process_group = lambda: None
    ctx.broadcast = lambda value, src: value
    with (
        mock.patch.dict(context._contexts, {ctx.name: ctx}),
        mock.patch.object(hopper, "machine_reason", return_value=None),
        mock.patch.object(auto, "device_name", return_value="NVIDIA H100 80GB HBM3"),
        mock.patch.object(torch, "zeros", torch.empty),
    ):
        for m in rows:
            operators_for(family, torch.bfloat16, Product(m, *PRODUCTS[family], ctx.name)).of(m)
    return ctx.heap.allocator.used_bytes, Counter(one.variant for one in ctx.operators.values())


@pytest.mark.parametrize("family", PRODUCTS)
def test_any_number_of_rows_takes_at_most_twice_the_heap_of_the_largest(family: str) -> None:
    """`auto` takes other variants for few rows, each with memory of its own, and operators grow step by step."""
    draw = random.Random(32)  # of 40 seeds that of the most, 1.49
    rows = [draw.randint(1, MOST) for _ in range(200)]
    used, made = heap_and_variants(family, rows)
    alone, _ = heap_and_variants(family, [max(rows)])
    assert len(made) > 1
    assert max(made.values()) == 1
    assert alone < used <= 2 * alone
