"""The trace-event format that Perfetto and Chrome open: a process per rank, a thread per program or part of it, µs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .spans import Span


def perfetto_events(
    ranks: Sequence[Sequence[Span]],
    *,
    name: Callable[[Span], str],
    thread: Callable[[Span], tuple[int, str]],
    details: Callable[[Span], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the events of all ranks' spans; time begins with the first span of any.

    Args:
        ranks: each rank's spans, on one clock.
        name: of a span.
        thread: the place among a rank's threads, and the name, of who recorded a span.
        details: what is shown of a span beside its time.
    """
    start = min((span.begin_ns for spans in ranks for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, place, title) for place, title in sorted(set(map(thread, spans)))]
        events += [
            {
                "name": name(span),
                "ph": "X",
                "pid": rank,
                "tid": thread(span)[0],
                "ts": (span.begin_ns - start) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
                "args": details(span),
            }
            for span in sorted(spans, key=lambda span: span.begin_ns)
        ]
    return events


def write_perfetto(path: Path, events: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write a trace for ui.perfetto.dev.

    Args:
        path: the file, JSON, which is overwritten.
        events: in the Trace Event format of Chrome, with times in µs.
        about: what the file says of itself, whatever JSON holds.
    """
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}))


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
