"""What a stress run draws: its operators, their calls, and the same again from a seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from families import FUSED

from iris_bench.stress.plan import SETS, WARM_UP_SET, Decisions, Plan, make_plan


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


def test_all_variants_are_called_alike_whatever_sizes_they_can_do() -> None:
    """Here the one with stream-K can do one size alone."""
    wide = plan_of(variants="fused_sequential:portable:stream_k,fused_sequential:portable").subjects
    narrow = [
        subject for subject in wide if subject.variant != "fused_sequential:portable:stream_k" or subject.size.m == 256
    ]
    decisions = Decisions(0, narrow, 4)
    calls = Counter(narrow[decisions.call().subject].variant_key for _ in range(20_000))
    assert len(calls) == 8
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
