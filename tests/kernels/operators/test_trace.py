"""Traces: every tile once, times in order, the output still right; nothing of it in kernels that are not traced."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checking import fault, make_data
from compiling import Case, StubContext, _operands, compile_kernel, recorded_launches
from compiling import make_problem as problem_of
from families import FAMILIES, FUSED, make_problem, name
from matplotlib import pyplot
from ranks import Ranks, context
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.command import ranks as ranks_of_bench
from iris_bench.trace import cli as trace_cli
from iris_bench.trace import traced as traces
from iris_bench.trace.plot import plot_traces
from iris_bench.trace.traced import KINDS, Traced, thread_of, write_trace
from iris_core import PeerError
from iris_core.rendezvous import rank_info
from iris_core.tracing import Span, align, make_spans, read_spans
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.device import trace as spans
from iris_kernels.common.hopper import host as hopper
from overlap_taxonomy import Variant, get_variant

M, N, K = 40, 70, 20
CONFIG = GemmConfig(16, 16, 16, num_warps=4, num_sms=3, comm_sms=1, descriptors=False)


def trace_call(
    rank: int, world_size: int, family: str, variant: str, capacity: int, config: GemmConfig = CONFIG
) -> Any:
    """Trace the second of three calls; return what was wrong with the calls, its spans, and how many were lost."""
    ctx = context()
    problem = make_problem(family, M, N, K, world_size, torch.bfloat16)
    operator = get_variant(family, variant).build(ctx, problem, config)
    trace = make_spans(capacity, ctx.get_device())
    faults = []
    for call in range(3):
        operator.trace_to(trace if call == 1 else None)
        data = make_data(family, problem, rank, call, ctx.get_device())
        faults.append(fault(operator.as_matrix(operator(data.a, data.b).clone()), data, torch.bfloat16))
    ctx.barrier()
    found, lost = read_spans(trace)
    operator.close()
    return [wrong for wrong in faults if wrong], [tuple(span) for span in found], lost


def num_tiles(variant: Variant, world_size: int) -> int:
    """Return how many tiles a rank multiplies."""

    def cdiv(size: int, part: int) -> int:
        return -(-size // part)

    rows, columns = cdiv(M, CONFIG.block_m), cdiv(N, CONFIG.block_n)
    if variant.family == "gemm_all_scatter":
        return rows * cdiv(cdiv(N, world_size), CONFIG.block_n)
    if variant.name == "fused_sequential:portable:stream_k":  # shards are not told apart, and CONFIG has one split
        return rows * (cdiv(cdiv(N, world_size), CONFIG.block_n) if variant.family == "all_gather_gemm" else columns)
    shard_rows = cdiv(cdiv(M, world_size), CONFIG.block_m)  # shard by shard
    if variant.family == "all_gather_gemm":
        return world_size * shard_rows * cdiv(cdiv(N, world_size), CONFIG.block_n)
    return world_size * shard_rows * columns


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("variant", [one for one in FUSED if one.can_trace], ids=name)
def test_every_tile_is_multiplied_once_and_times_are_in_order(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    for faults, found, lost in ranks(2).call(trace_call, variant.family, variant.name, 4096):
        assert (faults, lost) == ([], 0)
        rows = [Span(*span) for span in found]
        tiles = [span.tile for span in rows if span.kind == spans.MULTIPLY.value]
        assert sorted(tiles) == list(range(num_tiles(variant, 2)))
        assert all(span.begin_ns <= span.end_ns for span in rows)
        assert {span.kind for span in rows} <= KINDS.keys()
        by_thread: dict[Any, list[Span]] = {}
        for span in rows:
            by_thread.setdefault(thread_of(span), []).append(span)
        for of_thread in by_thread.values():
            of_thread.sort(key=lambda span: (span.begin_ns, span.end_ns))
            assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(of_thread))


@pytest.mark.parametrize("device", ["cpu"])
def test_parts_of_a_tile_are_left_and_added(ranks: Callable[[int], Ranks]) -> None:
    """Nine tiles for four programs: two of them share the last."""
    sharing = replace(CONFIG, num_sms=4, group_m=1, splits=2)
    for faults, found, lost in ranks(2).call(
        trace_call, "all_gather_gemm", "fused_sequential:portable:stream_k", 4096, sharing
    ):
        assert (faults, lost) == ([], 0)
        rows = [Span(*span) for span in found]
        multiplied, stored, added = (
            Counter(span.tile for span in rows if span.kind == kind.value)
            for kind in (spans.MULTIPLY, spans.STORE, spans.SUM)
        )
        assert multiplied == {tile: 1 + (tile == 8) for tile in range(9)}
        assert stored == multiplied  # the tile by the program that leads it, a sum by the other
        assert added[8] == 1


@pytest.mark.parametrize("device", ["cpu"])
def test_spans_without_room_are_counted(ranks: Callable[[int], Ranks]) -> None:
    for faults, found, lost in ranks(2).call(trace_call, "gemm_all_scatter", "fused_sequential:portable", 5):
        assert (faults, len(found)) == ([], 5)
        assert lost > 0


def compiled(case: Case, *, traced: bool) -> Any:
    with recorded_launches() as launches, mock.patch.object(hopper, "machine_reason", return_value=None):
        ctx = StubContext(case)
        operator = get_variant(case.family, case.variant).build(ctx, problem_of(case))
        if traced:
            operator.trace_to(make_spans(64, ctx.get_device()))
        operator(*_operands(operator.problem, case))
    return [compile_kernel(kernel, arguments, case.target) for kernel, arguments in launches]


@pytest.mark.parametrize(
    ("family", "variant", "target"),
    [
        ("gemm_all_scatter", "workgroup_specialized:portable", "sm_90"),
        ("gemm_all_scatter", "workgroup_specialized:portable", "gfx942"),
        ("gemm_all_scatter", "warp_specialized:sm90", "sm_90"),
        ("all_gather_gemm", "producer_consumer:portable", "sm_90"),
        ("all_gather_gemm", "workgroup_specialized:sm90", "sm_90"),
        ("gemm_reduce_scatter", "fused_sequential:portable", "gfx942"),
        ("gemm_reduce_scatter", "warp_specialized:sm90", "sm_90"),
        ("gemm_all_reduce", "warp_specialized:sm90", "sm_90"),
    ],
)
def test_kernels_that_are_not_traced_have_nothing_of_it(family: str, variant: str, target: str) -> None:
    case = Case(variant, target, family=family, rank=2)  # Triton's cache has it plain for test_codegen.py, too
    for plain, traced in zip(compiled(case, traced=False), compiled(case, traced=True), strict=True):
        clock = r"%globaltimer|s_memrealtime"
        assert "spans.py" not in plain.code
        assert "spans.py" in traced.code
        assert traced.count(clock) > plain.count(clock)
        # Where the plain kernel lacks registers for a word or two (test_codegen_hopper.py), this one may.
        adds_partials = variant == "warp_specialized:sm90" and FAMILIES[family].sums_partials
        assert traced.scratch_bytes <= (32 if adds_partials else 0)


def test_a_default_whose_warp_groups_take_turns_is_traced_without_turns() -> None:
    made: list[Any] = []

    def build(ctx: Any, problem: Any, config: GemmConfig | None = None) -> Any:
        made.append(mock.Mock(config=config or GemmConfig(128, 128, 64, pingpong=True)))
        return made[-1]

    ctx: Any = None
    assert traces._traceable(build, ctx, None) is made[1]
    assert made[1].config == replace(made[0].config, pingpong=False)
    made[0].close.assert_called_once()
    assert traces._traceable(lambda *_: made[1], ctx, None) is made[1]


def test_clocks_are_aligned_by_the_barriers() -> None:
    apart = [1000, 1010, 990, 1000, 1005, 995]
    first = [0, 100, 200, 300, 400, 500]
    offsets, accuracy = align([first, [time + offset for time, offset in zip(first, apart, strict=True)]])
    assert offsets == [0, 1000]
    assert accuracy == 10


def test_a_trace_is_written_and_drawn(tmp_path: Path) -> None:
    push = spans.PUSH.value
    ranks = [[Span(0, 0, 0, 5000, 7000), Span(0, push, 0, 7000, 7500)], [Span(2, 0, 1, 4000, 9000)]]
    traced = Traced("a family", "a variant", "a problem", "a config", ranks, 700.0, 3)
    assert (traced.begin_ns, traced.total_us) == (4000, 5.0)
    write_trace(traced, tmp_path / "trace.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_traces([traced], tmp_path / "trace.png")
        idle = Traced("a family", "a variant", "a problem", "a config", [*ranks, []], 700.0, 3)
        plot_traces([idle], tmp_path / "idle.png")  # a rank of a small problem may have nothing to do
    assert (tmp_path / "trace.png").stat().st_size > 1000
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written["otherData"]["clock_accuracy_us"] == 0.7
    assert written["otherData"]["lost_spans"] == 3
    assert written["otherData"]["title"] == "a family/a variant, a problem"
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert [(event["pid"], event["name"], event["ts"], event["dur"]) for event in events] == [
        (0, "multiply", 1.0, 2.0),
        (0, "push", 3.0, 0.5),
        (1, "multiply", 0.0, 5.0),
    ]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(threads.values()) == ["program 0", "program 2", "push program 0"]
    assert {(event["pid"], event["tid"]) for event in events} == threads.keys()


def test_every_role_is_a_thread_of_its_own() -> None:
    by_kind = {kind: thread_of(Span(7, kind, 0, 0, 1)) for kind in KINDS}
    assert len(set(by_kind.values())) == 4
    for one in (spans.MULTIPLY, spans.PUSH, spans.SEND, spans.COLLECT):
        same = {spans.MULTIPLY: spans.WAIT, spans.PUSH: spans.PUSH_WAIT, spans.SEND: spans.SEND_WAIT}
        assert by_kind[one.value] == by_kind[same.get(one, spans.COLLECT_WAIT).value]


def test_several_variants_are_drawn_on_one_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of each, every kind of span, the axis as long as the longest."""
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    kinds = [Span(0, kind, 0, 1000 * kind, 1000 * kind + 500) for kind in KINDS]
    short = Traced("a family", "short", "a problem", "", [[Span(0, 0, 0, 5000, 7000)], kinds], 0.0, 0)
    long = Traced("a family", "long", "a problem", "", [kinds, [Span(0, 0, 0, 0, 90_000)]], 0.0, 0)
    plot_traces([short, long], tmp_path / "trace.svg")
    (figure,) = figures
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim() == (0, pytest.approx(90.9))
    assert (upper.get_title("left"), lower.get_title("left")) == ("short: 10 µs", "long: 90 µs")
    assert [len(axes.get_yticks()) for axes in (upper, lower)] == [1, 4]
    assert figure.get_size_inches()[0] == 9
    plot_traces([short, long], tmp_path / "order.svg", interpreted=True)
    upper, lower = figures[-1].axes
    assert (upper.get_title("left"), lower.get_title("left")) == ("short", "long")
    assert "no time" in lower.get_xlabel()
    assert not list(lower.get_xticks())
    with pytest.raises(ValueError, match="empty"):
        plot_traces([short, Traced("a family", "none", "a problem", "", [[], []], 0.0, 0)], tmp_path / "trace.svg")


@pytest.mark.parametrize(
    ("variant", "shape", "said"),
    [
        ("library", "64x64x64", "writes no trace"),
        ("fused_sequential:portable,library", "64x64x64", "writes no trace"),
        ("warp_specialized:sm90", "64x64x64", "cannot do this"),
        ("fused", "64x64x64", "unknown variant 'fused'"),
        ("fused_sequential:portable", "smoke", "one --family and one --shape"),
    ],
)
def test_what_cannot_be_traced_is_refused(tmp_path: Path, variant: str, shape: str, said: str) -> None:
    asked = ["trace", "--family", "gemm_all_scatter", "--variant", variant, "--shape", shape, "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [*asked, "--out", str(tmp_path / "trace.json")])
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for variable in (*rank_info.TORCHRUN_VARIABLES, *ranks_of_bench._MPI_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    out = ["--out", str(tmp_path / "trace.json"), "--plot", str(tmp_path / "trace.png")]
    common = ["--family", "gemm_all_scatter", "--shape", "64x64x64", "--device", "cpu", "--world-size", "2"]
    return ["trace", *common, *out]


def test_several_variants_are_traced(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "trace-fused_sequential_portable.json").write_text("of an earlier run")
    result = CliRunner().invoke(
        cli.app, [*asked, "--variant", "fused_sequential:portable,bulk_synchronous:portable", "--overwrite"]
    )
    assert result.exit_code == 0, result.output
    for variant in ("fused_sequential:portable", "bulk_synchronous:portable"):
        written = json.loads((tmp_path / f"trace-{variant.replace(':', '_')}.json").read_text())
        assert f"gemm_all_scatter/{variant}, 64x64x64" in written["otherData"]["title"]
    assert (tmp_path / "trace.png").exists()
    assert not (tmp_path / "trace.json").exists()


def test_fp8_is_traced_with_its_scales(tmp_path: Path, asked: list[str]) -> None:
    """Which an operator takes as operands."""
    given = ["--variant", "fused_sequential:portable", "--dtype", "fp8", "--scales", "tensor"]
    result = CliRunner().invoke(cli.app, [*asked, *given])
    assert result.exit_code == 0, result.output
    title = json.loads((tmp_path / "trace.json").read_text())["otherData"]["title"]
    assert "64x64x64, float8_e4m3fn" in title


def test_a_rank_under_a_launcher_leaves_at_once(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """Where peers may be gone it does not stay for threads of a process group; others say what was the matter."""

    def fail(*_: Any) -> Traced:
        raise PeerError("rank 1 is gone")

    left: list[int] = []

    def leave_at_once(status: int) -> None:
        left.append(status)
        raise SystemExit(status)

    launcher = ranks_of_bench.Launcher("torchrun", 0, 2)
    monkeypatch.setattr(trace_cli, "find_launcher", lambda: launcher)
    monkeypatch.setattr(traces, "record", fail)
    monkeypatch.setattr(os, "_exit", leave_at_once)
    result = CliRunner().invoke(cli.app, [*asked, "--variant", "fused_sequential:portable"])
    assert (result.exit_code, left) == (1, [1])
    assert "the trace ended early: PeerError: rank 1 is gone" in result.stderr
