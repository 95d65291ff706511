"""Every variant of every family gives the right output on every rank: awkward shapes, all layouts, all dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from checking import fault, make_data, poison
from families import FUSED, VARIANTS, make_problem, name
from ranks import Ranks, context, raised

from iris_bench.measure.families import FAMILIES
from iris_bench.measure.sweep import _FLAGS_BYTES
from overlap_taxonomy import Variant, get_variant

# On GPUs, test_gpu.py has what there is time to compile.
pytestmark = pytest.mark.parametrize("device", ["cpu"])
LAYOUTS = ("kn", "nk", "strided")


@dataclass(frozen=True)
class Case:
    """Sizes of the whole, and what is awkward about them where tiles are 32 x 32 and a rank has four programs."""

    m: int
    n: int
    k: int
    why: str


CASES = [
    Case(1, 5, 3, "one row, smaller than a tile, and fewer columns than a rank's share in some worlds"),
    Case(1, 2, 7, "fewer columns than ranks: some have none"),
    Case(33, 37, 41, "divides nothing"),
    Case(64, 128, 96, "divides everything"),
    Case(70, 132, 32, "several tiles per program, and one step of the main loop"),
]


def run_cases(
    rank: int, world_size: int, family: str, variant: str, dtype: torch.dtype, cases: list[Case]
) -> list[str]:
    """Call one operator a case, and with some twice, with other data and another layout; return what was wrong."""
    ctx = context()
    faults = []
    for number, case in enumerate(cases):
        problem = make_problem(family, case.m, case.n, case.k, world_size, dtype)
        found = get_variant(family, variant)
        if reason := found.unsupported_reason(problem, None):
            if reason not in raised(found.build, ctx, problem)[1]:
                faults.append(f"{case}: does not say {reason}")
            continue
        operator = found.build(ctx, problem)
        for call in range(2 if world_size == 2 or case in UNEVEN else 1):
            layout = LAYOUTS[(number + call) % len(LAYOUTS)]  # each with several cases
            data = make_data(family, problem, rank, seed=call, device=ctx.get_device(), layout=layout)
            poison(operator)
            ctx.barrier()
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "divide by zero")  # the interpreter's; a GPU gives whatever it likes
                output = operator.as_matrix(operator(data.a, data.b))
            if wrong := fault(output, data, dtype):
                faults.append(f"{case}, {layout}, rank {rank}: {wrong}")
        operator.close()
    return faults


# Each dtype and each world size, not each of one with each of the other: a rank's dtype knows nothing of its peers.
WORLDS = [(1, torch.float32), (2, torch.float16), (3, torch.float32), (4, torch.bfloat16)]
UNEVEN = [case for case in CASES if case.why == "divides nothing"]  # where three ranks differ from two and four
# On the CPU `auto` makes a variant's operator that is here by its own name: once shows that it is made.
RUNS = [(variant, *world) for variant in VARIANTS for world in (WORLDS[1:2] if variant.delegates else WORLDS)]


@pytest.mark.parametrize(
    ("variant", "world_size", "dtype"),
    RUNS,
    ids=lambda value: name(value) if isinstance(value, Variant) else str(value).removeprefix("torch."),
)
def test_output_is_right(ranks: Callable[[int], Ranks], variant: Variant, world_size: int, dtype: torch.dtype) -> None:
    cases = CASES if world_size in (2, 4) else UNEVEN  # test_rows.py calls one rank with all numbers of rows
    faults = ranks(world_size).call(run_cases, variant.family, variant.name, dtype, cases)
    assert faults == [[]] * world_size


def heap_in_use(rank: int, world_size: int, family: str, variant: str) -> tuple[int, int]:
    """Return what an operator takes of the heap, and what the harness reckons with."""
    ctx = context()
    problem = make_problem(family, 512, 1024, 768, world_size, torch.bfloat16)
    before = ctx.heap.allocator.used_bytes
    operator = get_variant(family, variant).build(ctx, problem)
    used = ctx.heap.allocator.used_bytes - before
    operator.close()
    return used, FAMILIES[family].heap_bytes(problem)


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_the_harness_makes_the_heap_large_enough(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    for used, reckoned in ranks(2).call(heap_in_use, variant.family, variant.name):
        assert used <= reckoned + _FLAGS_BYTES // 8  # of flags and rounding, less than is allowed for
