"""`iris-bench layers`: layers that are right are timed, in all layouts and phases, and what is wrong is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks, context
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch_compiling import if_it_compiles

from iris_bench.benchmarks.layers import rank as bench
from iris_bench.benchmarks.layers import subjects
from iris_core import PeerError
from iris_kernels.common.operators.operator import Operator

JOB = bench.Job(
    tokens=8,
    width=12,
    features=16,
    layout="sequence",
    phases=bench.PHASES,
    subjects=(subjects.ALONE, "torch", "async_tp", "iris"),
    dtype="float32",
    rounds=1,
    burst=1,
    seed=3,
)
on_cpu = pytest.mark.parametrize("device", ["cpu"])


def measured(rank: int, world_size: int, job: bench.Job, spoil: str = "", what: str = "iris") -> list[bench.Outcome]:
    """Measure; `spoil` one gradient, or a row of the output, of one subject's layers on the last rank."""
    make, calls = subjects.make, 0

    def wrong(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if spoil == "shape":
            return output[1:]
        late = spoil == "late" and calls <= 1 + 3 + 1  # what is made first, the calls that are checked, the warm-up's
        factor = torch.ones(output.shape[0], 1)
        factor[-1] = 1.0 if late else float("nan") if spoil == "nan" else 1.001
        return output * factor

    def made(ctx: Any, subject: str, *args: Any) -> nn.Module:
        layers = make(ctx, subject, *args)
        if subject == what and rank == world_size - 1:
            if spoil == "gradient":
                layers.down.register_parameter("weight", nn.Parameter(layers.down.weight.detach()))
                layers.down.weight.register_hook(lambda grad: grad * 1.001)
            elif spoil:
                layers.register_forward_hook(wrong)
        return layers

    with mock.patch.object(bench, "context", context), mock.patch.object(subjects, "make", made):
        return bench.measure(rank, world_size, job)


@on_cpu
@pytest.mark.parametrize("layout", subjects.LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_are_checked_and_timed(ranks: Callable[[int], Ranks], world_size: int, layout: str) -> None:
    outcomes = ranks(world_size).call(measured, replace(JOB, layout=layout))
    assert all(one == outcomes[0] for one in outcomes)
    assert [(one.phase, one.subject) for one in outcomes[0]] == [
        (phase, subject) for phase in bench.PHASES for subject in JOB.subjects
    ]
    for one in outcomes[0]:
        assert one.status == ("unsupported" if one.subject == "async_tp" else "ok"), one.reason
        assert (one.time_us is not None) == (one.status == "ok")
        assert (one.error is not None) == (one.status == "ok")
        assert one.error is None or one.error < 1e-5


@on_cpu
@pytest.mark.parametrize(
    ("spoil", "what", "phases"),
    [
        ("row", "iris", {"forward", "step"}),
        ("nan", "iris", {"forward", "step"}),
        ("gradient", "iris", {"step"}),
        ("row", "torch", {"forward", "step"}),
        ("row", subjects.ALONE, {"forward", "step"}),
    ],
)
def test_what_is_wrong_is_not_timed(ranks: Callable[[int], Ranks], spoil: str, what: str, phases: set[str]) -> None:
    """A row, or a gradient, is off by a thousandth, on one rank of two."""
    for outcomes in ranks(2).call(measured, JOB, spoil, what):
        assert {one.phase for one in outcomes if one.status == "wrong"} == phases
        for one in outcomes:
            if one.status == "wrong":
                assert one.subject == what
                assert one.time_us is None
                assert "off by" in one.reason


@on_cpu
def test_what_is_wrong_once_it_was_timed_is_wrong(ranks: Callable[[int], Ranks]) -> None:
    job = replace(JOB, phases=("forward",), subjects=("torch", "iris"))
    for theirs, ours in ranks(2).call(measured, job, "late"):
        assert theirs.status == "ok"
        assert (ours.status, ours.time_us) == ("wrong", None)


def fail(rank: int, world_size: int, of_ranks: tuple[type[Exception] | None, ...], where: str) -> Any:
    """Measure where something cannot be done."""
    error, place = of_ranks[rank], subjects if where == "make" else bench
    as_it_is = getattr(place, where)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if error:
            raise error(f"said by rank {rank}")
        return as_it_is(*args, **kwargs)

    job = replace(JOB, phases=("forward",), subjects=("torch",))
    with mock.patch.object(bench, "context", context), mock.patch.object(place, where, failing):
        try:
            return [(one.status, one.reason, one.time_us) for one in bench.measure(rank, world_size, job)]
        except PeerError as lost:
            return str(lost)


@on_cpu
@pytest.mark.parametrize(
    ("where", "of_ranks", "found"),
    [
        ("make", (ValueError, ValueError), [("unsupported", "ValueError: said by rank 0", None)]),
        ("make", (ValueError, RuntimeError), [("error", "RuntimeError: said by rank 1", None)]),
        ("_forward", (ValueError, ValueError), [("error", "ValueError: said by rank 0", None)]),
        ("Pair", (MemoryError, MemoryError), [("error", "MemoryError: said by rank 0", None)]),
    ],
)
def test_what_cannot_be_done_has_its_reason(
    ranks: Callable[[int], Ranks], where: str, of_ranks: Any, found: Any
) -> None:
    assert ranks(2).call(fail, of_ranks, where) == [found] * 2


@on_cpu
def test_a_rank_that_fails_alone_is_every_ranks_error(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2).call(fail, (None, RuntimeError), "Pair"):
        assert "rank 1 failed and others did not: RuntimeError: said by rank 1" in message


def compile_them(rank: int, world_size: int) -> Any:
    torch._dynamo.utils.counters.clear()
    job = replace(JOB, subjects=("torch_compiled", "iris_replayed"), phases=("forward",))
    statuses = [one.status for one in measured(rank, world_size, job)]
    return statuses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@on_cpu
@if_it_compiles
def test_what_is_to_be_compiled_is(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(compile_them) == [(["ok"] * 2, 2)] * 2


def as_if_captured(rank: int, world_size: int) -> tuple[list[str], int]:
    """Measure as where graphs hold the calls of operators; return what came of it, and how many of these are left."""
    with mock.patch.object(Operator, "was_captured", True):
        outcomes = measured(rank, world_size, replace(JOB, subjects=("iris",), phases=("forward",)))
    return [one.status for one in outcomes], len(context().operators)


@on_cpu
def test_what_was_captured_is_given_back(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(as_if_captured) == [(["ok"], 0)] * 2


def look_at_code(rank: int, world_size: int) -> int:
    """Return how many codes layers of three subjects have."""
    whole = subjects.Pair(torch.zeros(4, 4), torch.zeros(4, 4))
    layers = [subjects.make(context(), name, "sequence", whole) for name in ("torch", "torch_compiled", "iris")]
    return len({id(type(one).forward.__code__) for one in layers})


@on_cpu
def test_subjects_are_not_compiled_in_one_place(ranks: Callable[[int], Ranks]) -> None:
    """Of one code the compiler makes 8 at most, and looks at all of them in every call."""
    assert ranks(2).call(look_at_code) == [3, 3]


def leave_apart(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Torch's overlapping layers, without the pass that overlaps."""
    off = mock.patch.multiple(subjects, _enable_async_tp=lambda *args: None, compiled=lambda subject, pair: pair)
    with off:
        return [(one.status, one.reason) for one in measured(rank, world_size, replace(JOB, subjects=("async_tp",)))]


@on_cpu
def test_layers_that_overlap_nothing_are_not_timed_as_such(ranks: Callable[[int], Ranks]) -> None:
    for forward, step in ranks(2).call(leave_apart):
        assert forward[0] == step[0] == "unsupported"
        assert "there are less than 1" in forward[1]
        assert "there are less than 2" in step[1]


def arrive(rank: int, world_size: int) -> tuple[bool, bool]:
    group = context().process_group()
    output = funcol.all_reduce(torch.ones(3), "sum", group)
    return type(output) is torch.Tensor, type(bench._arrived(output)) is torch.Tensor


@on_cpu
def test_what_torch_has_not_waited_for_is_waited_for(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(arrive) == [(False, True)] * 2


def test_a_pass_that_fuses_nothing_is_found() -> None:
    x = torch.ones(4, 4)
    for name in subjects._FUSED_BY_TORCH:
        assert name in subjects.why_not_fused(lambda: x @ x, 1)

    def both() -> None:
        for name in subjects._FUSED_BY_TORCH:
            with torch.profiler.record_function(name):
                x @ x

    assert subjects.why_not_fused(both, 1) == ""
    assert "less than 2" in subjects.why_not_fused(both, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_layers_are_measured_on_gpus(ranks: Callable[[int], Ranks]) -> None:
    """Torch's overlapping pass, too, which fuses or is said not to."""
    job = replace(JOB, tokens=512, width=512, features=1024, dtype="bfloat16", subjects=tuple(subjects.SUBJECTS))
    for one in ranks(2).call(measured, job)[0]:
        assert one.status == "ok" or one.subject == "async_tp", one.reason
        assert one.status in ("ok", "unsupported")
