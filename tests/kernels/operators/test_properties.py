"""Properties of operators over sizes, dtypes, world sizes, layouts and orders of calls that nobody chose.

What fails is printed as an example that can be run again; `HYPOTHESIS_PROFILE=thorough` looks at many more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from checking import Data, fault, poison
from families import FUSED, make_problem, name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks, context
from scaled import FP8, KINDS, make_any_data

from overlap_taxonomy import Variant, get_variant, list_families

pytestmark = pytest.mark.parametrize("device", ["cpu"])

COMMON: Any = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("quick", max_examples=4, derandomize=True, database=None, **COMMON)
settings.register_profile("thorough", max_examples=100, **COMMON)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

LAYOUTS = ("kn", "nk", "strided", "offset")
WIDE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALES = {f"fp8 {'-'.join(scales)}": scales for scales in KINDS}
# 1, about the size of a tile (32), and up to three of them.
sizes = st.one_of(st.just(1), st.integers(1, 8), st.sampled_from((31, 32, 33)), st.integers(9, 97))
several_blocks = st.integers(257, 520)  # of scales, also where two ranks share k


@dataclass(frozen=True)
class Case:
    """An operator and the layouts of its calls' operands."""

    m: int
    n: int
    k: int
    dtype: str
    layouts: tuple[str, ...]

    def problem(self, family: str, world_size: int) -> Any:
        dtype = WIDE.get(self.dtype, FP8)
        return make_problem(family, self.m, self.n, self.k, world_size, dtype, scales=SCALES.get(self.dtype, ()))


layouts = st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3).map(tuple)
wide_cases = st.builds(Case, sizes, sizes, sizes, st.sampled_from(sorted(WIDE)), layouts)
of_rows, of_blocks = [one for one in SCALES if "block" not in one], [one for one in SCALES if "block" in one]
row_cases = st.builds(Case, sizes, sizes, sizes, st.sampled_from(of_rows), layouts)
block_cases = st.builds(Case, sizes, sizes, several_blocks, st.sampled_from(of_blocks), layouts)


def shifted(matrix: torch.Tensor) -> torch.Tensor:
    """Return the same matrix as a view that starts one element and one row into its memory."""
    rows, columns = matrix.shape
    room = torch.full((rows + 1, columns + 1), float("nan"), dtype=matrix.dtype)
    room[1:, 1:] = matrix
    return room[1:, 1:]


def make_call(family: str, problem: Any, rank: int, seed: int, layout: str) -> Data:
    device = context().get_device()
    if layout != "offset":
        return make_any_data(family, problem, rank, seed, device, layout=layout)
    data = make_any_data(family, problem, rank, seed, device)
    return replace(data, a=shifted(data.a), b=shifted(data.b))


def call_case(rank: int, world_size: int, family: str, variant: str, case: Case) -> list[str]:
    ctx = context()
    problem = case.problem(family, world_size)
    operator = get_variant(family, variant).build(ctx, problem)
    faults = []
    for seed, layout in enumerate(case.layouts):
        data = make_call(family, problem, rank, seed, layout)
        poison(operator)
        if wrong := fault(operator.as_matrix(operator(data.a, data.b, **data.scales)), data, problem.out_dtype):
            faults.append(f"call {seed}, {layout}, rank {rank}: {wrong}")
    operator.close()
    return faults


@pytest.mark.parametrize("cases", [wide_cases, row_cases, block_cases], ids=["wide", "fp8", "fp8 blocks"])
@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_any_size_dtype_and_layout_is_right(
    ranks: Callable[[int], Ranks], variant: Variant, cases: st.SearchStrategy[Case]
) -> None:
    @settings(PROFILE, max_examples=PROFILE.max_examples // (1 if cases is wide_cases else 2))
    @given(case=cases, world_size=st.integers(1, 4))
    def check(case: Case, world_size: int) -> None:
        assert ranks(world_size).call(call_case, variant.family, variant.name, case) == [[]] * world_size

    check()


@dataclass
class Script:
    """What all ranks do, in order: make an operator, call one, close one, make one like a closed one again."""

    steps: list[tuple[str, int]] = field(default_factory=list)
    made: list[tuple[str, str, Case]] = field(default_factory=list)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Draw up to four operators, open at the same time or not, and calls of those that are open."""
    script = Script()
    open_ones: list[int] = []
    for _ in range(draw(st.integers(3, 12))):
        what = draw(st.sampled_from(["make", "call", "call", "call", "remake", "close"]))
        if (what == "make" and len(script.made) < 4) or not open_ones:
            family = draw(st.sampled_from(list_families()))
            variant = draw(st.sampled_from([v.name for v in FUSED if v.family == family]))
            script.made.append((family, variant, draw(st.one_of(wide_cases, row_cases, block_cases))))
            open_ones.append(len(script.made) - 1)
            script.steps.append(("make", open_ones[-1]))
            continue
        which = draw(st.sampled_from(open_ones))
        script.steps.append((what if what != "make" else "call", which))
        if what == "close":
            open_ones.remove(which)
    return script


def follow(rank: int, world_size: int, script: Script) -> list[str]:
    """Do what the script says, with no barrier but the operators' own; leave nothing on the heap."""
    ctx = context()
    used = ctx.heap.allocator.used_bytes
    operators: dict[int, Any] = {}
    faults = []
    for number, (what, which) in enumerate(script.steps):
        family, variant, case = script.made[which]
        problem = case.problem(family, world_size)
        if what in ("close", "remake"):
            operators.pop(which).close()
        if what in ("make", "remake"):
            operators[which] = get_variant(family, variant).build(ctx, problem)
        elif what == "call":
            data = make_call(family, problem, rank, number, case.layouts[number % len(case.layouts)])
            poison(operators[which])
            if wrong := fault(operators[which](data.a, data.b, **data.scales), data, problem.out_dtype):
                faults.append(f"step {number} ({family}/{variant}), rank {rank}: {wrong}")
    for operator in operators.values():
        operator.close()
    ctx.barrier()
    if ctx.heap.allocator.used_bytes != used:
        faults.append(f"{ctx.heap.allocator.used_bytes - used} bytes are left on the heap")
    return faults


def test_any_order_of_making_calling_and_closing_is_right(ranks: Callable[[int], Ranks]) -> None:
    @settings(PROFILE, max_examples=3 * PROFILE.max_examples)
    @given(script=scripts(), world_size=st.integers(1, 3))
    def check(script: Script, world_size: int) -> None:
        assert ranks(world_size).call(follow, script) == [[]] * world_size

    check()
