"""A trace of one call of one variant: what each program of each rank did when, on one line of time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import iris_core
from iris_core import Context
from iris_core.tracing import Span, Trace, perfetto_events, write_perfetto
from iris_kernels.common.device import trace as spans
from overlap_taxonomy import get_variant

from ..command.outputs import writing
from ..measure.families import FAMILIES
from ..measure.inputs import Draw
from ..measure.job import Job

_CAPACITY = 1 << 18  # spans a rank
_WARM_UP_CALLS = 3  # the first compiles
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
    family, draw = FAMILIES[job.family], Draw(job.seed, problem, 0, ctx.get_device())
    operands, read = family.operands(problem, rank, draw), family.read(problem, rank, draw)
    trace = Trace(ctx, list(KINDS.values()), capacity=_CAPACITY)
    operator.trace_to(trace.words)
    for _ in range(1 if ctx.is_interpreted() else _WARM_UP_CALLS):
        operator(*operands, **read)
    ctx.barrier()
    operator(*operands, **read)  # on a GPU under way while the next is queued: links that rest take 200 us to wake
    trace.clear()
    ctx.device_barrier()
    operator(*operands, **read)
    found = trace.gather()
    described = f"{job.shape}, {job.dtype}, {world_size} ranks"
    config = operator.describe_config()
    operator.close()
    ctx.close()
    return Traced(job.family, variant, described, config, found.ranks, found.accuracy_ns, found.lost)


def _traceable(build: Any, ctx: Context, problem: Any) -> Any:
    """Return an operator; where by default warp groups would take turns, of which there is no trace, one without."""
    operator = build(ctx, problem)
    config = getattr(operator, "config", None)  # operators of libraries have none
    if not config or not config.pingpong:
        return operator
    operator.close()
    return build(ctx, problem, replace(config, pingpong=False))


def thread_of(span: Span) -> tuple[int, str]:
    """Return the place among a rank's threads, and the name, of who wrote a span."""
    role = role_of(span)
    return (role << 16) + span.program, f"{ROLES[role]} {span.program}"


def role_of(span: Span) -> int:
    """Return the index in ROLES of who wrote a span."""
    return _ROLE_OF_KIND.get(span.kind, 0)


def write_trace(traced: Traced, path: Path) -> None:
    """Write a file for Perfetto: a process per rank, a thread per program or role."""
    events = perfetto_events(
        traced.ranks,
        name=lambda span: KINDS[span.kind],
        thread=thread_of,
        details=lambda span: {"tile": span.tile},
    )
    about = {
        "title": traced.title,
        "config": traced.config,
        "clock_accuracy_us": traced.accuracy_ns / 1e3,
        "lost_spans": traced.lost,
    }
    with writing(path):
        write_perfetto(path, events, about)
