"""What a stress run draws: its operators, their calls, and the same again from a seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from families import FUSED

from iris_bench.correctness.stress.plan import SETS, WARM_UP_SET, Decisions, Plan, make_plan
from iris_bench.measure.families import FAMILIES
from iris_kernels.common.config import DTYPES

OPEN = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def plan_of(seed: int = 0, device: str = "cuda", **options: Any) -> Plan:
    asked = {"families": "all", "variants": "all", "dtypes": "bf16,fp16", "device": device, "world_size": 4} | options
    return make_plan(**asked, seed=seed)


def test_all_fused_variants_are_called_on_awkward_shapes() -> None:
    for device in ("cpu", "cuda"):
        plan = plan_of(device=device)
        for variant in FUSED:
            sizes = [s.size for s in plan.subjects if (s.family, s.variant) == (variant.family, variant.name)]
            assert any(size.m == 1 and size.n < plan.world_size for size in sizes)
            assert any(size.m % 16 and size.n % 16 and size.k % 16 and size.m > 1 for size in sizes)
        assert {subject.dtype for subject in plan.subjects} == {"bf16", "fp16"}
        assert not any(subject.variant.startswith(("library", "async_tp")) for subject in plan.subjects)


def test_fp8_stands_for_all_formats_and_scales_and_a_seed_draws_them_again() -> None:
    plan = plan_of(dtypes="fp8")
    drawn = plan.drawn(5, "sm_90")
    scaled = [subject.scaled for subject in drawn.subjects if subject.scaled]
    assert len(scaled) == len(plan.subjects)
    assert {(one.a, one.b) for one in scaled} == {(a, b) for a in OPEN for b in OPEN}
    kinds = {("tensor", "tensor"), ("row", "column"), ("tensor", "column"), ("row", "tensor"), ("block", "block")}
    assert {one.scales for one in scaled} == kinds
    quantised = [subject for subject in drawn.subjects if subject.scaled and subject.scaled.given]
    assert {subject.family for subject in quantised} == {"all_gather_gemm"}
    assert {subject.problem().a_dtype for subject in quantised} == set(DTYPES)
    assert {subject.scaled.scales[0] for subject in quantised if subject.scaled} == {"row"}
    assert plan.drawn(5, "sm_90") == drawn != plan.drawn(6, "sm_90")
    assert {subject.scaled.a for subject in plan.drawn(5, "gfx942").subjects if subject.scaled} == set(FNUZ)
    needed = sum(FAMILIES[subject.family].heap_bytes(subject.problem()) for subject in drawn.subjects)
    assert plan.heap_bytes > needed
    for variant in FUSED:
        assert any(subject.variant_key == (variant.family, variant.name) for subject in drawn.subjects)


def test_a_gpu_without_fp8_says_what_works() -> None:
    with pytest.raises(ValueError, match="sm_80 does not multiply fp8; bf16, fp16 and fp32 work: --dtype bf16,fp16"):
        plan_of(dtypes="bf16,fp8").drawn(0, "sm_80")
    assert plan_of(dtypes="bf16").drawn(0, "sm_80").subjects == plan_of(dtypes="bf16").subjects


def test_all_variants_are_called_alike_whatever_sizes_they_can_do() -> None:
    """Here the one with stream-K can do one size alone."""
    wide = plan_of(variants="fused_sequential:portable:stream_k,fused_sequential:portable").subjects
    narrow = [
        subject for subject in wide if subject.variant != "fused_sequential:portable:stream_k" or subject.size.m == 256
    ]
    decisions = Decisions(0, narrow, 4)
    calls = Counter(narrow[decisions.call().subject].variant_key for _ in range(20_000))
    assert len(calls) == 6
    assert max(calls.values()) < 1.2 * min(calls.values())


def test_a_seed_draws_the_same_calls_again() -> None:
    def drawn(seed: int) -> list[Any]:
        decisions = Decisions(seed, plan_of().subjects, 4)
        return [decisions.renewal() if number % 50 == 0 else decisions.call() for number in range(2000)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_what_is_drawn_is_varied_and_no_output_could_pass_for_the_next() -> None:
    plan = plan_of()
    decisions = Decisions(0, plan.subjects, 4)
    calls = [decisions.call() for _ in range(20_000)]
    assert {call.subject for call in calls} == set(range(len(plan.subjects)))
    assert {call.late_rank for call in calls if call.before_us} == set(range(4))
    assert {call.operands for call in calls} == set(range(SETS))
    assert any(call.host_us for call in calls)
    assert any(call.before_us > 1000 for call in calls)
    last = dict.fromkeys(range(len(plan.subjects)), WARM_UP_SET)
    for call in calls:
        assert last[call.subject] != call.operands
        last[call.subject] = call.operands
