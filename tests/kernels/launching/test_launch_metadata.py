"""What a profiler shows of a launch: a kernel's name, its FLOPs and its bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext, recorded_launches
from driving import build, case_of, driven, operands
from families import FUSED, make_problem, name, stem

from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.problem import Problem
from overlap_taxonomy import Variant, get_variant, list_variants

SIZES = (520, 1024, 768)
RANK, WORLD_SIZE = 1, 4
# Where they run another family's or variant's kernels.
KERNELS_OF = {
    "gemm_all_reduce": ("gemm_all_reduce", "gemm_reduce_scatter"),
    "copy_engine:sm90": ("copy_engine_sm90", "copy_engine_barrier"),
}
MOVE_NOTHING = ("_finish", "_signal", "_barrier")  # kernels that do


def shown(family: str, variant: str) -> tuple[Problem, list[dict[str, Any]]]:
    """Return the problem, and what is shown of each launch of a call of one rank."""
    case = Case(variant, "sm_90", rank=RANK, family=family, world_size=WORLD_SIZE)
    problem = make_problem(family, *SIZES, WORLD_SIZE, torch.bfloat16)
    with mock.patch.object(hopper, "machine_reason", return_value=None), recorded_launches() as launches:
        operator = get_variant(family, variant).build(StubContext(case), problem)
        operator(
            *(torch.zeros(shape, dtype=torch.bfloat16) for shape in (problem.a_shape(RANK), problem.b_shape(RANK)))
        )
    found = []
    for kernel, arguments in launches:
        called = kernel.fn.__name__
        if kernel.launch_metadata is None:
            assert called.endswith(MOVE_NOTHING)
            found.append({"name": called})
        else:
            found.append(kernel.launch_metadata((1,), SimpleNamespace(name=called), arguments))
    return problem, found


def product_of(problem: Problem) -> tuple[int, int, int]:
    k, n = problem.b_shape(RANK)
    return problem.m, n, k


@pytest.mark.parametrize("variant", [one for one in FUSED if one.can_trace], ids=name)
def test_the_flops_of_a_call_are_those_of_the_ranks_product(variant: Variant) -> None:
    problem, found = shown(variant.family, variant.name)
    m, n, k = product_of(problem)
    assert sum(launch.get("flops16", 0) for launch in found) == 2 * m * n * k


@pytest.mark.parametrize("variant", [one for one in list_variants() if one.can_trace], ids=name)
def test_kernels_carry_family_and_variant(variant: Variant) -> None:
    families = KERNELS_OF.get(variant.family, (variant.family,))
    variants = KERNELS_OF.get(variant.name, (stem(variant.name),))
    starts = tuple(f"{family}_{named}" for family in families for named in variants)
    of_others = tuple(f"{start}_{part}" for start in starts for part in ("sm90", "stream_k"))
    for launch in shown(variant.family, variant.name)[1]:
        assert launch["name"].startswith(starts), launch
        assert not launch["name"].startswith(of_others), launch


@pytest.mark.parametrize(
    ("family", "variant", "moved"),
    [
        ("gemm_all_scatter", "copy_engine:portable", 0),  # what is sent is copied
        ("gemm_all_scatter", "fused_sequential:portable", 3 * 520 * 256),
        ("gemm_all_scatter", "warp_specialized:sm90", 3 * 520 * 256),
        ("gemm_all_scatter", "workgroup_specialized:portable", 3 * 520 * 256),
        ("all_gather_gemm", "copy_engine:portable", 0),
        ("all_gather_gemm", "workgroup_specialized:sm90", 3 * 130 * 768),
        ("all_gather_gemm", "copy_engine:sm90", 0),
        ("all_gather_gemm", "workgroup_specialized:portable", 3 * 130 * 768),
        ("all_gather_gemm", "fused_sequential:portable:stream_k", 3 * 130 * 768),
        # Partials of three shards sent, those of three peers read.
        ("gemm_reduce_scatter", "fused_sequential:portable", 2 * 3 * 130 * 1024),
        ("gemm_reduce_scatter", "fused_sequential:portable:stream_k", 2 * 3 * 130 * 1024),
        ("gemm_reduce_scatter", "warp_specialized:sm90", 2 * 3 * 130 * 1024),
        # The same, and sums sent to three peers.
        ("gemm_all_reduce", "workgroup_specialized:portable", 3 * 3 * 130 * 1024),
        ("gemm_all_reduce", "warp_specialized:sm90", 3 * 3 * 520 * 256),  # by columns
        # Partials sent to three peers, and those of all four read.
        ("gemm_all_reduce", "fused_sequential:portable:stream_k", (3 + 4) * 520 * 1024),
    ],
)
def test_bytes_are_those_of_operands_and_results_and_of_what_is_exchanged(
    family: str, variant: str, moved: int
) -> None:
    problem, found = shown(family, variant)
    m, n, k = product_of(problem)
    (launch,) = [one for one in found if one.get("flops16")]
    assert launch["bytes"] == 2 * (m * k + k * n + m * n + moved)
    assert launch["name"].endswith(f"[M={m}, N={n}, K={k}]")


@pytest.mark.parametrize(
    ("family", "variant", "moved"),
    [
        ("gemm_all_scatter", "bulk_synchronous_push", 3 * 520 * 256),
        ("all_gather_gemm", "producer_consumer_push", 3 * 130 * 768),
        ("gemm_reduce_scatter", "producer_consumer_push", 3 * 130 * 1024),
        ("gemm_reduce_scatter", "bulk_synchronous_pull", 5 * 130 * 1024),  # four partials, and their sum
    ],
)
def test_a_kernel_that_only_moves_has_bytes_and_no_flops(family: str, variant: str, moved: int) -> None:
    _, found = shown(family, variant.rpartition("_")[0])
    (launch,) = [one for one in found if one["name"] == f"{family}_{variant}"]
    assert (launch["flops16"], launch["bytes"]) == (0, 2 * moved)


def test_a_prepared_launch_asks_for_nothing() -> None:
    case = case_of(get_variant("gemm_all_scatter", "fused_sequential:portable"))
    with driven(case) as (ctx, log, _), mock.patch("iris_kernels.common.launch.launch_metadata._itemsize") as asked:
        operator = build(case, ctx)
        for _ in range(3):
            operator(*operands(case))
        assert log.take()
        asked.assert_not_called()
