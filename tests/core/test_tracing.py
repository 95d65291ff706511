"""Traces of users' kernels: what is recorded, with which peer and bytes, and the file of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context

import iris_core
from iris_core import tracing


@triton.jit
def record_kernel(trace_ptr, rank, KIND: tl.constexpr):
    begin = tracing.begin_event(trace_ptr)
    end = tracing.end_event(trace_ptr, KIND, begin, rank + 1, 64, tl.program_id(0))
    tracing.record_event(trace_ptr, KIND + 1, begin, end)


def record(rank: int, world_size: int, path: str, capacity: int) -> Any:
    ctx = context()
    trace = tracing.Trace(ctx, ("send", "wait"), capacity=capacity)
    record_kernel[(3,)](None, rank, 0)
    record_kernel[(3,)](trace.words, rank, 0)
    trace.clear()
    record_kernel[(3,)](trace.words, rank, 0)
    traced = trace.write(path)
    return [[tuple(span) for span in spans] for spans in traced.ranks], traced.lost


@pytest.mark.parametrize("world_size", [1, 3])
def test_spans_of_all_ranks_are_in_one_file(ranks: Callable[[int], Ranks], world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    results = ranks(world_size).call(record, str(path), 16)
    assert all(result == results[0] for result in results)
    spans, lost = results[0]
    assert lost == 0
    assert len(spans) == world_size
    for rank, found in enumerate(spans):
        rows = [tracing.Span(*row) for row in found]
        assert all(row.begin_ns <= row.end_ns for row in rows)
        assert sorted((row.program, row.kind, row.tile, row.peer, row.num_bytes) for row in rows) == sorted(
            row for program in range(3) for row in [(program, 0, program, rank + 1, 64), (program, 1, -1, -1, 0)]
        )
    written = json.loads(path.read_text())
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert [event["pid"] for event in events] == [rank for rank in range(world_size) for _ in range(6)]
    assert {event["name"] for event in events} == {"send", "wait"}
    sent = [event["args"] for event in events if event["name"] == "send" and event["pid"] == 0]
    assert sorted(one["tile"] for one in sent) == [0, 1, 2]
    assert {(one["peer"], one["bytes"]) for one in sent} == {(1, 64)}
    assert min(event["ts"] for event in events) == 0


def test_spans_without_room_are_counted(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    spans, lost = ranks(2).call(record, str(tmp_path / "trace.json"), 4)[0]
    assert [len(found) for found in spans] == [4, 4]
    assert lost == 4


@triton.jit
def put_kernel(context_tensor, source_ptr, target_ptr, tracing: tl.constexpr):
    ctx = iris_core.DeviceContext.initialize(context_tensor, tracing=tracing)
    peer = (ctx.rank + 1) % ctx.world_size
    lanes = tl.arange(0, 16)
    event = ctx.tracing.record_event_start(
        event_id=iris_core.TraceEvent().put,
        target_rank=peer,
        address=target_ptr + lanes,
        pid_m=tl.program_id(0),
        pid_n=7,
        mask=lanes < 5,
    )
    ctx.put(source_ptr + lanes, target_ptr + lanes, peer, mask=lanes < 5)
    ctx.tracing.record_event_end(event)
    own = ctx.tracing.record_event_start(14, ctx.rank, source_ptr, 0, 0)
    ctx.tracing.record_event_end(own)


def record_by_context(rank: int, world_size: int, folder: str) -> Any:
    ctx = context()
    source, target = ctx.ones(16), ctx.zeros(16)
    context_tensor = ctx.get_device_context()
    with pytest.raises(RuntimeError, match="tracing is not enabled"):
        ctx.tracing.export(f"{folder}/none.json")
    put_kernel[(2,)](context_tensor, source, target, True)  # into no trace
    assert not ctx.tracing.enabled
    ctx.tracing.enable(max_events=16, kinds=("own",))
    put_kernel[(2,)](context_tensor, source, target, True)
    assert ctx.tracing.trace_counter.item() == 4
    ctx.tracing.reset()
    put_kernel[(2,)](context_tensor, source, target, False)
    assert ctx.tracing.trace_counter.item() == 0
    put_kernel[(2,)](context_tensor, source, target, True)
    merged = ctx.tracing.export(f"{folder}/trace.json")
    own = ctx.tracing.export(f"{folder}/trace.json", merge=False)
    ctx.tracing.disable()
    put_kernel[(2,)](context_tensor, source, target, True)
    ctx.barrier()
    assert target[:5].tolist() == [1.0] * 5
    ctx.free(target)
    ctx.free(source)
    return [[span[:3] + span[5:] for span in spans] for spans in merged.ranks], len(own.ranks[rank])


def events_in(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("device", ["cpu"])
def test_events_of_a_context_are_in_one_file_or_one_a_rank(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    put = iris_core.device.tracing.EVENTS.index("put")
    for spans, own in ranks(2).call(record_by_context, str(tmp_path)):
        assert own == 4
        for rank, found in enumerate(spans):
            puts = [(program, put, program << 32 | 7, 1 - rank, 20) for program in range(2)]
            assert sorted(found) == sorted([*puts, *((program, 14, 0, rank, 4) for program in range(2))])
    written = events_in(tmp_path / "trace.json")
    assert [(event["pid"], event["name"]) for event in written].count((1, "put")) == 2
    assert {event["name"] for event in written} == {"put", "own"}
    assert {"peer": 0, "bytes": 20, "pid_m": 1, "pid_n": 7} in [event["args"] for event in written]
    for rank in range(2):
        assert {event["pid"] for event in events_in(tmp_path / f"trace_rank{rank}.json")} == {rank}
    assert not (tmp_path / "none.json").exists()


def misuse(rank: int, world_size: int, path: str) -> None:
    ctx = context()
    with pytest.raises(ValueError, match="capacity is 0"):
        tracing.Trace(ctx, ("send",), capacity=0)
    trace = tracing.Trace(ctx, ("send",))
    record_kernel[(1,)](trace.words, rank, 0)
    with pytest.raises(ValueError, match=r"kinds \[1\]; kinds has 1 names"):
        trace.write(path)


@pytest.mark.parametrize("device", ["cpu"])
def test_misuse_is_an_error(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks(2).call(misuse, str(tmp_path / "trace.json"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cpu"])
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert ranks(2).call(write_nowhere, str(tmp_path / "none/trace.json")) == ["FileNotFoundError", "PeerError"]


def write_nowhere(rank: int, world_size: int, path: str) -> str:
    trace = tracing.Trace(context(), ("send",))
    try:
        trace.write(path)
    except Exception as error:
        return type(error).__name__
    return "written"


def test_reads_what_was_written_in_words() -> None:
    words = tracing.make_spans(2, torch.device("cpu"))
    assert tracing.read_spans(words) == ([], 0)
    words[0] = 3
    words[2:9] = torch.arange(7)
    spans, lost = tracing.read_spans(words)
    assert (spans[0], len(spans), lost) == (tracing.Span(0, 1, 2, 3, 4, 5, 6), 2, 1)
    tracing.clear_spans(words)
    assert tracing.read_spans(words) == ([], 0)
