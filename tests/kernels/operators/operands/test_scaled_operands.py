"""fp8 operands and their scales: C is within what rounding allows of the product of what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checking import fault, poison
from families import VARIANTS, make_problem, name
from ranks import Ranks, context
from scaled import KINDS, make_scaled_data

from overlap_taxonomy import Variant, get_variant

# One that divides nothing; more tiles than programs, and several blocks of k and n; empty ranks.
SIZES = [(33, 37, 41), (70, 300, 420), (1, 2, 7)]


def run(rank: int, world_size: int, family: str, variant: str, scales: tuple[str, ...]) -> list[str]:
    """Call an operator on fp8 operands, twice; return what was wrong."""
    ctx, faults = context(), []
    for m, n, k in SIZES:
        problem = replace(make_problem(family, m, n, k, world_size, torch.float8_e4m3fn), scales=scales)
        operator = get_variant(family, variant).build(ctx, problem)
        for seed in range(2):
            made = make_scaled_data(family, problem, rank, seed)
            poison(operator)
            ctx.barrier()
            output = operator.as_matrix(operator(made.a, made.b, **made.scales))
            if wrong := fault(output, made.data, problem.out_dtype):
                faults.append(f"{m}x{n}x{k}, rank {rank}: {wrong}")
        operator.close()
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("scales", KINDS, ids="-".join)
@pytest.mark.parametrize("variant", [one for one in VARIANTS if not one.delegates], ids=name)
def test_every_variant_scales_them(ranks: Callable[[int], Ranks], variant: Variant, scales: tuple[str, ...]) -> None:
    assert ranks(3).call(run, variant.family, variant.name, scales) == [[]] * 3
