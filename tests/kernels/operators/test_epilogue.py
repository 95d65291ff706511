"""An epilogue's ops, one of them defined here, are applied once to each element of C, by every variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checking import fault, make_data, poison
from epilogues import finished_data, own_vector, register_marks
from families import VARIANTS, make_problem, name
from ranks import Ranks, context, raised

from overlap_taxonomy import Variant, get_variant

SIZES = [(33, 37, 41), (70, 132, 32), (1, 2, 7)]  # one that divides nothing; more tiles than programs; empty ranks


def run(rank: int, world_size: int, family: str, variant: str, epilogue: tuple[str, ...]) -> list[str]:
    """Call an operator with an epilogue, twice; return what was wrong."""
    register_marks()
    ctx, faults = context(), []
    for m, n, k in SIZES:
        problem = replace(make_problem(family, m, n, k, world_size, torch.float32), epilogue=epilogue)
        found = get_variant(family, variant)
        if reason := found.unsupported_reason(problem, None):
            if reason not in raised(found.build, ctx, problem)[1]:
                faults.append(f"does not say {reason}")
            continue
        operator = found.build(ctx, problem)
        for seed in range(2):
            data = make_data(family, problem, rank, seed=seed, device=ctx.get_device())
            operands = {op: own_vector(op, family, problem, rank) for op in problem.operand_shapes(rank)}
            poison(operator)
            ctx.barrier()
            output = operator.as_matrix(operator(data.a, data.b, **operands))
            if wrong := fault(output, finished_data(data, family, problem, rank), problem.dtype):
                faults.append(f"{m}x{n}x{k}, rank {rank}: {wrong}")
        operator.close()
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("variant", [one for one in VARIANTS if not one.delegates], ids=name)
def test_every_variant_applies_it(ranks: Callable[[int], Ranks], variant: Variant, world_size: int) -> None:
    faults = ranks(world_size).call(run, variant.family, variant.name, ("bias", "gelu", "marks"))
    assert faults == [[]] * world_size
