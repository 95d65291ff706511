"""Prepared calls queue what Triton would queue, and are prepared anew when operands need other kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, make_problem
from driving import SIDE_STREAM, Log, driven, on_stream
from triton import knobs
from triton.runtime.jit import JITFunction

from iris_kernels.common import graphs, launching
from iris_kernels.common.hopper import operator as hopper
from overlap_taxonomy import Variant, get_variant, list_variants

SIZE = 1024
FUSED = [variant for variant in list_variants() if variant.has_kernels]


def name(variant: Variant) -> str:
    return f"{variant.family}-{variant.name}"


def case_of(variant: Variant, **changes: Any) -> Case:
    return Case(variant.name, "sm_90", family=variant.family, size=SIZE, rank=1, **changes)


def matrix(shape: tuple[int, int], *, by_columns: bool = False, shift: int = 0) -> torch.Tensor:
    """Return a matrix, `shift` elements behind where its memory starts."""
    rows, columns = shape[::-1] if by_columns else shape
    lines = torch.empty(rows * columns + shift, dtype=torch.bfloat16)[shift:].view(rows, columns)
    return lines.t() if by_columns else lines


def operands(case: Case, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem = make_problem(case)
    return matrix(problem.a_shape(case.rank), **changes), matrix(problem.b_shape(case.rank), by_columns=True)


def build(case: Case, ctx: Any, **options: Any) -> Any:
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        return get_variant(case.family, case.variant).build(ctx, make_problem(case), None, **options)


def flat(entry: Any) -> list[Any]:
    """Return all that stands in an entry, in tuples too."""
    return [one for part in entry for one in flat(part)] if isinstance(entry, tuple) else [entry]


def through_triton(operator: Any, log: Log, *data: torch.Tensor) -> list[Any]:
    """Return what a call queues while Triton has a hook; its launches on a side stream say so."""
    with mock.patch.object(knobs.runtime, "launch_enter_hook", mock.Mock()):
        operator(*data)
    return log.take()


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_a_prepared_call_queues_what_triton_would(variant: Variant) -> None:
    case = case_of(variant)
    with driven(case) as (ctx, log, streams):
        operator = build(case, ctx)
        data, others = operands(case), operands(case)
        expected, expected_of_others = through_triton(operator, log, *data), through_triton(operator, log, *others)
        config = operator.ran_config
        assert expected != expected_of_others
        assert any(entry[0] == "launch" for entry in expected)
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
            for _ in range(2):
                operator(*data)
                assert log.take() == expected
            compiled = run.call_count
            operator(*others)  # elsewhere, and otherwise the same
            assert log.take() == expected_of_others
            operator(*data)
            assert log.take() == expected
            assert run.call_count == compiled == sum(entry[0] == "launch" for entry in expected)
        assert operator.ran_config == config
        streams[0] = 5  # another current stream
        operator(*data)
        moved = log.take()
    assert moved == [on_stream(entry, 5) for entry in expected]


COPY_ENGINE = get_variant("gemm_all_scatter", "copy_engine")


@pytest.mark.parametrize("change", ["alignment", "stride", "columns", "back"])
def test_operands_that_need_other_kernels_go_to_triton(change: str) -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        a, b = operands(case)
        operator(a, b)
        first = operator.ran_config
        assert first.descriptors
        if change == "alignment":
            a = matrix(tuple(a.shape), shift=1)
        elif change == "stride":
            a = matrix((a.shape[0], 2 * a.shape[1]))[:, ::2]
        elif change == "columns":
            a = matrix(tuple(a.shape), by_columns=True)
        log.take()
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
            operator(a, b)
        prepared = log.take()
        assert (run.call_count > 0) == (change != "back")
        assert operator.ran_config == first
        assert operator.describe_config().endswith("" if change == "back" else " copied=A")
        assert prepared == through_triton(operator, log, a, b)


PUSHES = get_variant("all_gather_gemm", "copy_engine")


def test_a_call_of_many_steps_becomes_a_graph() -> None:
    case = case_of(PUSHES)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        data, others = operands(case), operands(case)
        graphs = []
        for _ in range(3):
            operator(*data)
            graphs.append(log.graphs)
        assert graphs == [0, 1, 2]  # the first time it may be the only one
        operator(*others)
        assert log.graphs == 2
        operator(*others)
        assert log.graphs == 3
        log.take()
        ctx.backend.is_capturing = lambda: True  # the caller's graph gets the steps
        operator(*data)
        assert log.graphs == 3
        assert len(log.take()) >= 8
        captured = list(operator._calls._graphs._graphs)
        assert len(captured) == 2
        operator.close()
        assert not any(graph.is_open for graph in captured)


def test_no_more_graphs_are_kept_than_the_limit() -> None:
    case = case_of(PUSHES)
    with driven(case) as (ctx, log, _), mock.patch.object(graphs, "_MOST_GRAPHS", 1):
        operator = build(case, ctx)
        data, others = operands(case), operands(case)
        for _ in range(2):
            operator(*data)
            operator(*others)
        assert log.graphs == 1
        log.take()
        operator(*others)
        steps = log.take()
        assert steps == through_triton(operator, log, *others)


def test_of_other_calls_there_is_no_graph() -> None:
    assert graphs_of_three_calls(get_variant("gemm_all_scatter", "fused_sequential")) == 0


WAITS = [COPY_ENGINE, get_variant("gemm_reduce_scatter", "copy_engine")]  # a stream, for words that a kernel counts


@pytest.mark.parametrize("variant", WAITS, ids=name)
def test_where_a_stream_waits_for_a_kernel_only_what_is_behind_the_kernel_is_a_graph(variant: Variant) -> None:
    case = case_of(variant)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        data, others = operands(case), operands(case)
        operator(*data)
        steps = log.take()
        operator(*others)  # the graph is of what is the same in every call: one for all
        operator(*data)
        assert log.graphs == 2
        assert len(operator._calls._graphs._graphs) == 1
        log.take()
        operator(*data)
        assert log.take() == steps
        (captured,) = (graph._captured for graph in operator._calls._graphs._graphs)
        assert log.graph_streams == [SIDE_STREAM] * 3
        assert {entry[0] for entry in captured} <= {"wait", "copy", "launch"}
        launched = [steps.index(entry) for entry in steps if entry[0] == "launch"]
        assert launched[0] < steps.index(captured[0]), "the kernel that counts is queued first"


@pytest.mark.parametrize("variant", [PUSHES, *WAITS], ids=name)
def test_where_streams_share_a_connection_there_are_no_graphs(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert graphs_of_three_calls(variant) == 0


@pytest.mark.parametrize("variant", [PUSHES, *WAITS], ids=name)
def test_prepared_calls_past_the_limit_are_forgotten_with_their_graphs(variant: Variant) -> None:
    case = case_of(variant)
    with driven(case) as (ctx, log, _), mock.patch.object(launching, "_MOST_CALLS", 2):
        operator = build(case, ctx)
        places = [operands(case) for _ in range(3)]
        expected = [through_triton(operator, log, *data) for data in places]
        for _ in range(2):
            for data, steps in zip(places, expected, strict=True):
                for _ in range(2):
                    operator(*data)  # a graph that was closed is not launched: StubGraph
                    assert log.take() == steps
                assert len(operator._calls._calls) <= 2


def graphs_of_three_calls(variant: Variant) -> int:
    case = case_of(variant)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        data = operands(case)
        for _ in range(3):
            operator(*data)
        return log.graphs


def test_where_no_graph_can_be_made_steps_are_queued() -> None:
    case = case_of(PUSHES)
    with driven(case) as (ctx, log, _):
        ctx.backend.capture = mock.Mock(side_effect=RuntimeError("CUDA driver: no room"))
        operator = build(case, ctx)
        data = operands(case)
        operator(*data)
        expected = log.take()
        with pytest.warns(UserWarning, match="step by step.*CUDA driver: no room"):
            operator(*data)
        operator(*data)
        assert log.take() == [*expected, *expected]
        assert ctx.backend.capture.call_count == 1


def test_another_dtype_is_refused_at_a_prepared_address() -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        a, b = operands(case)
        operator(a, b)
        log.take()
        with pytest.raises(ValueError, match=r"A is torch\.float16"):
            operator(a.view(torch.float16), b)
        with pytest.raises(ValueError, match="the operator was made for"):
            operator(a.view(a.shape[1], a.shape[0])[: a.shape[0] // 2], b)
        assert log.take() == []


@pytest.mark.parametrize("name", ["copy_engine", "warp_specialized", "fused_sequential"])
def test_a_is_copied_in_every_call_that_needs_a_copy(name: str) -> None:
    case = case_of(get_variant("all_gather_gemm", name))
    with driven(case) as (ctx, _, _):
        operator = build(case, ctx, **({} if name == "fused_sequential" else {"keep_gathered": True}))
        a, b = operands(case)
        rows = slice(*operator.problem.rows(case.rank))
        copied = operator._staged if name == "fused_sequential" else operator.gathered[rows]
        for value in (1.0, 2.0):
            a.fill_(value)
            operator(a, b)
            assert copied[: len(a)].eq(value).all()


@pytest.mark.parametrize("descriptors", [True, False])
def test_copy_engines_push_rows_of_a_matrix_by_columns_from_the_heap(descriptors: bool) -> None:
    case = case_of(PUSHES)
    with driven(case) as (ctx, log, _):
        config = replace(build(case, ctx).config, descriptors=descriptors)
        operator = PUSHES.build(ctx, make_problem(case), config)
        _, b = operands(case)
        a = matrix(make_problem(case).a_shape(case.rank), by_columns=True)
        own = operator.gathered[slice(*operator.problem.rows(case.rank))]
        for value in (1.0, 2.0):
            a.fill_(value)
            operator(a, b)
            entries = log.take()
            assert {entry[2] for entry in entries if entry[0] == "copy"} == {own.data_ptr()}
            if descriptors:  # a kernel copies it, ahead of the rest
                assert entries[0][0] == "launch"
                assert {a.data_ptr(), own.data_ptr()} <= set(flat(entries[0]))
            else:
                assert own.eq(value).all()


def test_no_call_is_prepared_in_debug_mode_or_under_a_profiler() -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        data = operands(case)
        operator(*data)
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
            through_triton(operator, log, *data)
            hooked = run.call_count
            ctx.debug = True
            ctx.agree = mock.Mock()  # type: ignore[method-assign]
            operator(*data)
            assert run.call_count == 2 * hooked > 0
            assert ctx.agree.called


def test_a_prepared_call_keeps_no_operand() -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, _, _):
        operator = build(case, ctx)
        a, b = operands(case)
        operator(a, b)
        with mock.patch.object(torch.Tensor, "data_ptr", side_effect=AssertionError):
            next(iter(operator._calls._calls.values())).sequence()  # addresses are numbers


def test_another_launcher_is_refused() -> None:
    case = case_of(COPY_ENGINE)
    with (
        driven(case) as (ctx, log, _),
        mock.patch("triton.backends.nvidia.driver._BASE_ARGS_FORMAT", "iiiKKOOOOOO"),
    ):
        operator = build(case, ctx)
        with pytest.raises(RuntimeError, match=r"install triton>=3\.6"):
            operator(*operands(case))
        assert log.take() == []
