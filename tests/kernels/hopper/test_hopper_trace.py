"""What the warp-specialised kernels write down of themselves, in the emulator; of their machine code: test_trace.py."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext
from emulated_handshake import World
from emulated_operators import COPIES, run_case
from families import make_problem
from gluon_emulator import Barrier, Machine, emulated
from test_hopper_emulated import CASES

from iris_bench.trace.traced import thread_of
from iris_core.tracing import Span, make_spans
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.device import trace as spans
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.hopper import pipeline
from iris_kernels.common.hopper.arguments import OneWayPipeline
from overlap_taxonomy import get_variant

MANY_STEPS, FEW_TILES, SPLITS = CASES[1], CASES[4], CASES[9]
KINDS = (spans.MULTIPLY, spans.SUM, spans.SEND, spans.COLLECT, spans.COLLECT_WAIT)


@pytest.mark.parametrize(
    ("family", "name", "case"),
    [
        ("gemm_all_scatter", "warp_specialized:sm90", MANY_STEPS),
        ("gemm_all_scatter", "warp_specialized:sm90", FEW_TILES),
        ("gemm_all_scatter", "warp_specialized:sm90", SPLITS),
        ("all_gather_gemm", COPIES, MANY_STEPS),
        ("all_gather_gemm", COPIES, SPLITS),
        ("gemm_reduce_scatter", "warp_specialized:sm90", MANY_STEPS),
        ("gemm_reduce_scatter", "warp_specialized:sm90", FEW_TILES),
        ("gemm_all_reduce", "warp_specialized:sm90", MANY_STEPS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.why,
)
def test_every_tile_is_traced(family: str, name: str, case: Any) -> None:
    """Each is multiplied and sent once, an own one of reduce-scatter collected and summed; a thread's are in order."""
    traced = run_case(family, name, case, 0, is_traced=True)
    assert traced.keys() == set(range(case.world_size))
    for found in traced.values():
        tiles = {kind: sorted(span.tile for span in found if span.kind == kind.value) for kind in KINDS}
        assert tiles[spans.MULTIPLY] == sorted(set(tiles[spans.MULTIPLY]))
        assert tiles[spans.SEND] == tiles[spans.MULTIPLY]
        if case.splits == 1:
            assert tiles[spans.MULTIPLY] == list(range(len(tiles[spans.MULTIPLY])))
        if family == "gemm_reduce_scatter":
            own = len(tiles[spans.MULTIPLY]) // case.world_size
            assert tiles[spans.SUM] == tiles[spans.COLLECT] == tiles[spans.COLLECT_WAIT]
            assert len(tiles[spans.SUM]) == own
            assert set(tiles[spans.SUM]) <= set(tiles[spans.MULTIPLY])
        by_thread: dict[Any, list[Span]] = defaultdict(list)
        for span in found:
            by_thread[thread_of(span)].append(span)
        for of_thread in by_thread.values():
            of_thread.sort(key=lambda span: span.begin_ns)
            assert all(span.begin_ns <= span.end_ns for span in of_thread)
            assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(of_thread))


def test_the_wait_for_a_tiles_first_operands_ends_when_they_are_there() -> None:
    machine = Machine(0, late="load")
    world = World(machine)
    barrier = Barrier()
    barrier.count = barrier.pending = 1
    full = SimpleNamespace(shape=[3, 1], index=lambda stage: barrier)
    operands = SimpleNamespace(barriers=OneWayPipeline(full))
    peers = SimpleNamespace(trace_ptr=0)
    times = {}

    def load() -> None:
        times["loaded"] = world.trace_time(peers)
        barrier.arrive(arrivals=1)

    def multiply() -> None:
        times["waited"] = pipeline.trace_first_step(operands, 0, peers, 7)

    with emulated(machine, [pipeline], **world.names):
        machine.spawn("multiply", multiply, rank=0)
        machine.spawn("load", load, rank=0)
        machine.run()
    (span,) = world.spans[0]
    assert span.begin_ns < times["loaded"] < span.end_ns == times["waited"]


def test_nothing_is_traced_of_warp_groups_in_turns() -> None:
    case = Case("warp_specialized:sm90", "sm_90")
    problem = make_problem(case.family, 1024, 1024, 1024, case.world_size, case.dtype)
    config = GemmConfig(128, 128, 64, comm_rows=32, pingpong=True)
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        operator = get_variant(case.family, case.variant).build(StubContext(case), problem, config)
    with pytest.raises(ValueError, match="pingpong=False"):
        operator.trace_to(make_spans(1, torch.device("cpu")))
    operator.trace_to(None)


def test_kernels_of_others_write_no_traces() -> None:
    case = Case("library", "sm_90")
    ctx: Any = StubContext(case)
    ctx.process_group = mock.Mock()
    problem = make_problem(case.family, 64, 64, 64, case.world_size, case.dtype)
    operator = get_variant(case.family, case.variant).build(ctx, problem)
    with pytest.raises(ValueError, match="not all its kernels write traces"):
        operator.trace_to(make_spans(1, torch.device("cpu")))
