"""What a rank does in a stress run: makes the operators, calls them as the plan's seed says, checks every output."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import iris_core
from iris_core import Context
from iris_kernels.common.calibration.timing import DeviceClock
from iris_kernels.common.launch.compile_ahead import compile_ahead
from iris_kernels.common.operators.operator import Operator
from overlap_taxonomy import get_variant

from ...measure import environment
from ...measure.correctness import Expectation
from ...measure.families import FAMILIES, Operands
from ...measure.inputs import Draw
from .ledger import Ledger, Note
from .plan import SETS, WARM_UP_SET, Call, Decisions, Plan, Subject


@dataclass(frozen=True)
class Data:
    """One set of operands on this rank, and what a call must give, an output and auxiliary ones, each with a bound.

    What is read beside A and B, their scales, is in `read`, by name.
    """

    operands: Operands
    read: dict[str, torch.Tensor]
    expected: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class _Checked(NamedTuple):
    """An output of a call that was checked."""

    subject: Subject
    call: int
    name: str  # for reports; "" is the output
    columns: int


@dataclass(frozen=True)
class Progress:
    """What has been done since the start, over all ranks; the same on every rank.

    Args:
        calls: calls made and checked, by subject; one of all ranks together counts once.
        elements: elements checked.
        mismatches: elements that were wrong.
        reports: the first wrong element of some calls since the last progress, in words.
        elapsed_s: since every operator was made and called once.
    """

    calls: tuple[int, ...]
    elements: int
    mismatches: int
    reports: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0


_run: _Run | None = None


def open_rank(rank: int, world_size: int, plan: Plan) -> dict[str, Any]:
    """Make this rank's context; collective. Returns the columns that describe its device, and the seed of all ranks."""
    global _run
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32, for the reference
    ctx = iris_core.iris(plan.heap_bytes, plan.device)
    seed = ctx.control_plane.broadcast(plan.seed, 0)  # under a launcher every rank has drawn its own
    with ctx.collective_section("draw the operators"):
        plan = plan.drawn(seed, ctx.get_arch())
    _run = _Run(ctx, plan)
    return {**environment.device_columns(ctx), "seed": seed}


def make_operator(rank: int, world_size: int, index: int) -> None:
    """Make a subject's operator, and draw its operands; collective."""
    _running().make_operator(index)


def compile_some(rank: int, world_size: int) -> tuple[int, int]:
    """Compile kernels of all operators for about a second; return how many are done, and of how many; collective."""
    return _running().compile_some()


def warm_up(rank: int, world_size: int, index: int) -> Progress:
    """Call a subject's operator for the first time; collective."""
    return _running().warm_up(index)


def call_often(rank: int, world_size: int, count: int) -> Progress:
    """Make so many calls and wait for them; collective.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
        PeerError: a rank died, or failed alone.
    """
    return _running().call_often(count)


def close_rank(rank: int, world_size: int) -> None:
    """End the operators and the context; collective."""
    global _run
    _running().close()
    _run = None


def _running() -> _Run:
    assert _run is not None, "open_rank comes first"
    return _run


class _Run:
    def __init__(self, ctx: Context, plan: Plan) -> None:
        self.ctx, self.plan = ctx, plan
        self._decisions = Decisions(plan.seed, plan.subjects, plan.world_size)
        self._ledger = Ledger(ctx.get_device())
        self._operators: list[Operator[Any]] = []
        self._data: dict[tuple[Any, ...], list[Data]] = {}
        self._num_drawn = 0
        self._calls = [0] * len(plan.subjects)
        self._number = 0  # of the last call
        self._checks = 0
        self._checked: dict[int, _Checked] = {}  # since the last look at the ledger
        self._mismatches = 0
        self._start = time.monotonic()
        self._compiling = compile_ahead(ctx, self._first_calls())

    def make_operator(self, index: int) -> None:
        subject = self.plan.subjects[index]
        if subject.data_key not in self._data:
            self._data[subject.data_key] = [self._draw(subject) for _ in range(SETS)]
        self._operators.append(self._build(subject, auxiliary=index % 2 == 0))

    def compile_some(self) -> tuple[int, int]:
        return next(self._compiling)

    def warm_up(self, index: int) -> Progress:
        self._call(Call(index, WARM_UP_SET, 0, 0.0, 0.0, 0.0))
        progress = self._progress()
        self._start = time.monotonic()
        return progress

    def call_often(self, count: int) -> Progress:
        self._renew()
        for _ in range(count):
            self._call(self._decisions.call())
        return self._progress()

    def close(self) -> None:
        for operator in self._operators:
            operator.close()
        self.ctx.close()

    def _first_calls(self) -> Iterator[tuple[Operator[Any], Operands, dict[str, torch.Tensor]]]:
        for subject, operator in zip(self.plan.subjects, self._operators, strict=True):
            data = self._data[subject.data_key][WARM_UP_SET]
            yield operator, data.operands, data.read

    def _call(self, call: Call) -> None:
        """Queue a call over a poisoned output, and the check of it. Nothing here waits for the device.

        Peers store to an output between its owner's ready signal and the end of the call, so its owner may write it in
        stream order before the next call, without asking.
        """
        subject, operator = self.plan.subjects[call.subject], self._operators[call.subject]
        data = self._data[subject.data_key][call.operands]
        is_late = call.late_rank == self.ctx.get_rank()
        operator.output.fill_(math.nan)
        if is_late:
            time.sleep(call.host_us * 1e-6)
            self._hold(call.before_us)
        output, *auxiliary = operator.call(*data.operands, **data.read)
        if is_late:
            self._hold(call.after_us)  # the peers' next calls must not touch the output until it is read
        self._number += 1
        for place, (one, expected) in enumerate(zip((output, *auxiliary), data.expected, strict=False)):
            self._checks += 1
            self._ledger.check(self._checks, operator.as_matrix(output) if place == 0 else one, *expected)
            name = f"auxiliary output {place}, " if place else ""
            self._checked[self._checks] = _Checked(subject, self._number, name, expected[0].shape[1])
        self._calls[call.subject] += 1

    def _hold(self, us: float) -> None:
        """Keep the device busy for about this long."""
        if us and self.ctx.is_interpreted():
            time.sleep(us * 1e-6)
        elif us:
            DeviceClock().sleep(us)

    def _renew(self) -> None:
        """Make one operator anew, and draw a set of operands that no call has seen."""
        renewal = self._decisions.renewal()
        self._operators[renewal.rebuilt].close()
        rebuilt = self.plan.subjects[renewal.rebuilt]
        self._operators[renewal.rebuilt] = self._build(rebuilt, auxiliary=renewal.auxiliary)
        key = list(self._data)[renewal.data]
        subject = next(subject for subject in self.plan.subjects if subject.data_key == key)
        self._data[key][renewal.operands] = self._draw(subject)

    def _build(self, subject: Subject, *, auxiliary: bool) -> Operator[Any]:
        options = FAMILIES[subject.family].auxiliary_options(subject.variant) if auxiliary else {}
        operator: Operator[Any] = get_variant(subject.family, subject.variant).build(
            self.ctx, subject.problem(), **options
        )
        return operator

    def _draw(self, subject: Subject) -> Data:
        family, problem, rank = FAMILIES[subject.family], subject.problem(), self.ctx.get_rank()
        draw = Draw(self.plan.seed, problem, self._num_drawn, self.ctx.get_device())
        self._num_drawn += 1
        shape = problem.c_shape(rank)
        expectation = Expectation(family.blocks(problem, rank, draw), shape=shape, dtype=problem.out_dtype)
        output = expectation.elements()
        exact = [one.to(output[0].dtype) for one in family.auxiliary(problem, draw)]
        expected = (output, *((one, torch.zeros_like(one)) for one in exact))
        return Data(family.operands(problem, rank, draw), family.read(problem, rank, draw), expected)

    def _progress(self) -> Progress:
        """Wait for the device, and add up what all ranks have found."""
        self.ctx.barrier()  # raises if a wait has failed
        wrong, notes = self._ledger.read()
        reports = [self._describe(note) for note in _first_of_each_call(notes)]
        self._checked.clear()
        elapsed_s = time.monotonic() - self._start
        found = self.ctx.control_plane.all_gather([wrong, reports, self._ledger.elements, elapsed_s])
        self._mismatches += sum(wrong for wrong, *_ in found)
        return Progress(
            calls=tuple(self._calls),
            elements=sum(elements for _, _, elements, _ in found),
            mismatches=self._mismatches,
            reports=[report for _, reports, _, _ in found for report in reports],
            elapsed_s=found[0][3],
        )

    def _describe(self, note: Note) -> str:
        checked = self._checked[note.call]
        row, column = divmod(note.element, checked.columns)
        where = f"{checked.name}at row {row}, column {column}"
        return (
            f"{checked.subject}, call {checked.call}, rank {self.ctx.get_rank()}: {where}: {note.value:.6g} instead of "
            f"{note.reference:.6g} within {note.bound:.2g} ({note.wrong} wrong in its block of the output)"
        )


def _first_of_each_call(notes: list[Note]) -> list[Note]:
    first: dict[int, Note] = {}
    for note in notes:
        first.setdefault(note.call, note)
    return list(first.values())
