"""A trace of one call of one variant: what each program of each rank did when, on one line of time.

Devices' clocks have zeros of their own. Ranks leave a device barrier together, to within its latency, and read their
clocks: the median difference over several barriers is what is taken off, its spread what is said of the accuracy.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import iris_core
from iris_core import Context, clock_ns
from iris_kernels.common.device import trace as spans
from iris_kernels.common.device.trace import Span
from overlap_taxonomy import get_variant

from ..command.outputs import writing
from ..measure.families import FAMILIES
from ..measure.inputs import Draw
from ..measure.job import Job

_CAPACITY = 1 << 18  # spans a rank
_WARM_UP_CALLS = 3  # the first compiles
_BARRIERS = 31
# By the numbers in iris_kernels.common.device.trace.
KINDS = {
    spans.MULTIPLY.value: "multiply",
    spans.STORE.value: "store",
    spans.WAIT.value: "wait",
    spans.SUM.value: "add partials",
    spans.PUSH.value: "push",
    spans.PUSH_WAIT.value: "wait to push",
    spans.SEND.value: "send",
    spans.SEND_WAIT.value: "wait to send",
    spans.COLLECT.value: "load partials",
    spans.COLLECT_WAIT.value: "wait for partials",
}
# Who writes spans: programs, of two kernels at once perhaps, and warps with a part of their own.
ROLES = ("program", "push program", "loader warp", "collector warp")
_ROLE_OF_KIND = {
    spans.PUSH.value: 1,
    spans.PUSH_WAIT.value: 1,
    spans.SEND.value: 2,
    spans.SEND_WAIT.value: 2,
    spans.COLLECT.value: 3,
    spans.COLLECT_WAIT.value: 3,
}


@dataclass(frozen=True)
class Traced:
    """A call's trace.

    Args:
        family, variant, problem: what was traced.
        config: the operator's configuration.
        ranks: each rank's spans, on rank 0's clock.
        accuracy_ns: how far apart the same moment may be on two ranks.
        lost: how many spans found no room.
    """

    family: str
    variant: str
    problem: str
    config: str
    ranks: list[list[Span]]
    accuracy_ns: float
    lost: int

    @property
    def title(self) -> str:
        """What was traced, in words."""
        return f"{self.family}/{self.variant}, {self.problem}"

    @property
    def begin_ns(self) -> int:
        """When the first span of any rank began."""
        return min((span.begin_ns for rank in self.ranks for span in rank), default=0)

    @property
    def total_us(self) -> float:
        """From then to the end of the last span of any rank."""
        return (max((span.end_ns for rank in self.ranks for span in rank), default=0) - self.begin_ns) / 1e3


@triton.jit
def clock_kernel(now_ptr):
    """Read the device's clock."""
    tl.store(now_ptr, clock_ns())


def record(rank: int, world_size: int, job: Job, variant: str, heap_bytes: int, device: str) -> Traced:
    """Trace a call; collective. Every rank returns the same.

    Where warp groups take turns by default, they multiply together here: `Traced.config` says so.

    Args:
        job: the problem.
        variant: one that can trace.
        heap_bytes: a rank.
    """
    ctx = iris_core.iris(heap_bytes, device)
    problem: Any = job.problem()
    operator = _traceable(get_variant(job.family, variant).build, ctx, problem)
    operands = FAMILIES[job.family].operands(problem, rank, Draw(job.seed, problem, 0, ctx.get_device()))
    trace = spans.make_trace(_CAPACITY, ctx.get_device())
    operator.trace_to(trace)
    for _ in range(1 if ctx.is_interpreted() else _WARM_UP_CALLS):
        operator(*operands)
    clocks = _read_clocks(ctx)
    ctx.barrier()
    operator(*operands)  # on a GPU still under way while the next is queued: links that rest take 200 us to wake
    spans.clear_trace(trace)
    ctx.device_barrier()
    operator(*operands)
    ctx.barrier()
    found, lost = spans.read_trace(trace)
    offsets, accuracy_ns = align(ctx.control_plane.all_gather(clocks))
    ranks = [
        [Span(*span)._replace(begin_ns=span[3] - offset, end_ns=span[4] - offset) for span in rank_spans]
        for rank_spans, offset in zip(ctx.control_plane.all_gather(found), offsets, strict=True)
    ]
    lost = sum(ctx.control_plane.all_gather(lost))
    described = f"{job.shape}, {job.dtype}, {world_size} ranks"
    config = operator.describe_config()
    operator.close()
    ctx.close()
    return Traced(job.family, variant, described, config, ranks, accuracy_ns, lost)


def _traceable(build: Any, ctx: Context, problem: Any) -> Any:
    """Return an operator; where by default warp groups would take turns, of which there is no trace, one without."""
    operator = build(ctx, problem)
    config = getattr(operator, "config", None)  # operators of libraries have none
    if not config or not config.pingpong:
        return operator
    operator.close()
    return build(ctx, problem, replace(config, pingpong=False))


def _read_clocks(ctx: Context) -> list[int]:
    """Return this device's time after each of some barriers; interpreted ranks have one clock."""
    if ctx.is_interpreted():
        return [0, 0]
    now = torch.zeros(_BARRIERS, dtype=torch.int64, device=ctx.get_device())
    for index in range(_BARRIERS):
        ctx.device_barrier()
        clock_kernel[(1,)](now[index], num_warps=1)
    ctx.barrier()
    return now.tolist()


def align(clocks: Sequence[Sequence[int]]) -> tuple[list[int], float]:
    """Return each rank's clock less rank 0's, and half the range that nine of ten barriers' differences lie in.

    Args:
        clocks: each rank's time after each barrier; that after the first is left out, which compiles.
    """
    offsets, accuracy = [], 0.0
    for rank in clocks:
        differences = sorted(own - first for own, first in zip(rank[1:], clocks[0][1:], strict=True))
        offsets.append(int(statistics.median(differences)))
        cut = len(differences) // 20
        accuracy = max(accuracy, (differences[-1 - cut] - differences[cut]) / 2)
    return offsets, accuracy


def thread_of(span: Span) -> tuple[int, str]:
    """Return the place among a rank's threads, and the name, of who wrote a span."""
    role = role_of(span)
    return (role << 16) + span.program, f"{ROLES[role]} {span.program}"


def role_of(span: Span) -> int:
    """Return the index in ROLES of who wrote a span."""
    return _ROLE_OF_KIND.get(span.kind, 0)


def write_trace(traced: Traced, path: Path) -> None:
    """Write the trace-event format that Perfetto and Chrome open: a process a rank, a thread a program or role, µs."""
    start = traced.begin_ns
    events: list[dict[str, Any]] = []
    for rank, found in enumerate(traced.ranks):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, thread, name) for thread, name in sorted(set(map(thread_of, found)))]
        events += [
            {
                "name": KINDS[span.kind],
                "ph": "X",
                "pid": rank,
                "tid": thread_of(span)[0],
                "ts": (span.begin_ns - start) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
                "args": {"tile": span.tile},
            }
            for span in sorted(found, key=lambda span: span.begin_ns)
        ]
    about = {
        "title": traced.title,
        "config": traced.config,
        "clock_accuracy_us": traced.accuracy_ns / 1e3,
        "lost_spans": traced.lost,
    }
    with writing(path):
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}))


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
