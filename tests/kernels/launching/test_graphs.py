"""What a call queues becomes a graph when it is made again, whole or the part that a side stream has."""

from __future__ import annotations

from unittest import mock

import pytest
from driving import SIDE_STREAM, build, case_of, driven, operands, through_triton
from families import name

from iris_kernels.common.launch import graphs
from iris_kernels.common.operators import prepared
from overlap_taxonomy import Variant, get_variant

COPY_ENGINE = get_variant("gemm_all_scatter", "copy_engine:portable")
PUSHES = get_variant("all_gather_gemm", "copy_engine:portable")


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
        captured = list(operator._channel.graphs._graphs)
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
    assert graphs_of_three_calls(get_variant("gemm_all_scatter", "fused_sequential:portable")) == 0


WAITS = [
    COPY_ENGINE,
    get_variant("gemm_reduce_scatter", "copy_engine:portable"),
]  # a stream, for words that a kernel counts


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
        assert len(operator._channel.graphs._graphs) == 1
        log.take()
        operator(*data)
        assert log.take() == steps
        (captured,) = (graph._captured for graph in operator._channel.graphs._graphs)
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
    with driven(case) as (ctx, log, _), mock.patch.object(prepared, "_MOST_CALLS", 2):
        operator = build(case, ctx)
        places = [operands(case) for _ in range(3)]
        expected = [through_triton(operator, log, *data) for data in places]
        for _ in range(2):
            for data, steps in zip(places, expected, strict=True):
                for _ in range(2):
                    operator(*data)  # a graph that was closed is not launched: StubGraph
                    assert log.take() == steps
                assert len(operator._channel.prepared) <= 2


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
