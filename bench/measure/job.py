"""What a rank does for one problem: makes every variant's operator, checks each, then times those that are right."""

from __future__ import annotations

import faulthandler
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import iris_core
from iris_core import AllocationMismatch, Context, PeerError
from iris_kernels.common.calibration import timing
from iris_kernels.common.config import GemmConfig, is_fp8
from iris_kernels.common.fp8.scaled_mm import multiply_scaled
from iris_kernels.common.fp8.scales import scale_shapes
from iris_kernels.common.launch.compile_ahead import compile_ahead
from iris_kernels.common.operators.operator import Operator
from iris_kernels.common.problem import Problem
from overlap_taxonomy import Variant, get_variant

from ..records.record import COMMUNICATION_ALONE, GEMM_ALONE, SCALES
from . import environment
from .correctness import Expectation
from .families import FAMILIES, Family
from .inputs import Draw
from .shapes import Shape

CHECKED_CALLS = 3
_TIMED_CALLS = 1000  # numbers of the operands for timing start here
_FATAL = (TimeoutError, PeerError, AllocationMismatch)  # after these, the ranks have no common heap any more

_STDERR = 2  # the descriptor, whatever sys.stderr is

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One problem and what to do with it.

    Args:
        variants: names, in the order of measurement.
        dtype: as torch names it.
        epilogue: the problem's.
        scales: of fp8 operands, as `Record.scales` has them.
        configured: what stands behind a name that is no variant's: the name, the variant, and its configuration.
    """

    family: str
    variants: tuple[str, ...]
    shape: Shape
    dtype: str
    world_size: int
    seed: int
    rounds: int
    burst: int
    timed: bool
    epilogue: tuple[str, ...] = ()
    scales: str = ""
    configured: tuple[tuple[str, str, GemmConfig], ...] = ()

    def behind(self, name: str) -> tuple[Variant, GemmConfig | None]:
        """Return the variant that a name stands for, and its configuration; None for the default."""
        for label, variant, config in self.configured:
            if label == name:
                return get_variant(self.family, variant), config
        return get_variant(self.family, name), None

    def problem(self) -> Problem:
        """Return the family's problem; ValueError where the sizes make none."""
        shape, dtype = self.shape, getattr(torch, self.dtype)
        return FAMILIES[self.family].problem(
            m=shape.m,
            n=shape.n,
            k=shape.k,
            world_size=self.world_size,
            dtype=dtype,
            epilogue=self.epilogue,
            **scaling(self.scales),
        )


def scaling(scales: str) -> dict[str, Any]:
    """Return what a problem takes of how its operands are scaled, as `Record.scales` has it: "row", "row-fast"."""
    kind, _, fast = scales.partition("-")
    return {"scales": SCALES[kind] if kind else (), "use_fast_accum": bool(fast)}


@dataclass(kw_only=True)
class Judged:
    """What is found out about whatever is measured, over all ranks: whether it is right, and then its times."""

    status: str = "ok"
    reason: str = ""
    error: float | None = None
    time_us: float | None = None
    latency_us: float | None = None
    host_us: float | None = None

    def timed(self, times: timing.Times) -> None:
        """Keep times, and what is to be said of them."""
        self.time_us, self.latency_us, self.host_us = times.time_us, times.latency_us, times.host_us
        self.reason = times.remark

    def failed(self, status: str, reason: str) -> None:
        """Keep the first thing that went wrong; there are no times then."""
        if self.status == "ok":
            self.status, self.reason = status, " ".join(reason.split())
        self.time_us = self.latency_us = self.host_us = None


@dataclass
class Outcome(Judged):
    """What was found out about one variant. The names are those of `Record`."""

    variant: str
    correct: bool | None = None
    config: str = ""


_context: Context | None = None


def open_rank(rank: int, world_size: int, heap_bytes: int, device: str) -> dict[str, str]:
    """Make this rank's context; collective. Returns the columns that describe its device."""
    global _context
    faulthandler.enable(_STDERR)  # a rank that crashes says where
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32, for the reference and for the library
    _context = iris_core.iris(heap_bytes, device)
    return environment.device_columns(_context)


def context() -> Context:
    """Return this rank's context."""
    assert _context is not None, "open_rank comes first"
    return _context


def close_rank(rank: int, world_size: int) -> None:
    """End this rank's context; collective."""
    global _context
    assert _context is not None
    _context.close()
    _context = None


def measure(rank: int, world_size: int, job: Job) -> list[Outcome]:
    """Return what each variant of a job came to, the same on every rank; collective.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
        PeerError: a rank died, or failed alone.
    """
    run = _Run(context(), FAMILIES[job.family], job)
    run.open()
    for call in range(CHECKED_CALLS):
        run.check(call)
    if job.timed:
        run.time()
        if job.burst > 1 or not context().is_interpreted():  # a call that follows bursts is as right as the first
            run.check(CHECKED_CALLS)
    run.close()
    return list(run.outcomes.values())


class _Run:
    """One job on one rank."""

    def __init__(self, ctx: Context, family: Family, job: Job) -> None:
        self.ctx, self.family, self.job = ctx, family, job
        self.problem: Any = job.problem()
        self.rank = ctx.get_rank()
        self.outcomes = {name: Outcome(name) for name in job.variants}
        self.operators: dict[str, Operator[Any]] = {}
        self._buffers: dict[str, torch.Tensor] = {}  # what each operator returned last

    def open(self) -> None:
        """Make the operators of all variants that can do this problem."""
        for name, outcome in self.outcomes.items():
            variant, config = self.job.behind(name)
            reason = variant.unsupported_reason(self.problem, config)
            if reason:
                outcome.failed("unsupported", reason)
                continue
            operator, error = attempt(self.ctx, variant.build, self.ctx, self.problem, config)
            if operator is not None:
                self.operators[name] = operator
            else:
                # A default configuration that suits no problem of this kind is refused with a ValueError.
                outcome.failed("unsupported" if error.startswith("ValueError") else "error", error)

    def check(self, call: int) -> None:
        """Call each operator that is right so far, on fresh data over a poisoned output, and judge what it gives."""
        draw = self._draw(call)
        prepared, error = attempt(self.ctx, self._prepare, draw)
        if prepared is not None and call == 0:
            operands, read, _ = prepared
            for _ in compile_ahead(self.ctx, [(operator, operands, read) for _, operator in self._right()]):
                pass
        for name, operator in self._right():
            outcome = self.outcomes[name]
            if prepared is None:
                outcome.failed("error", error)
                continue
            operands, read, expectation = prepared
            self._poison(name, operator)
            self.ctx.barrier()  # no peer pushes before the poison is in
            output, error = attempt(self.ctx, self._call, name, operator, operands, read)
            if output is None:
                outcome.failed("error", error)
                continue
            verdict = expectation.judge(output)
            outcome.config = operator.describe_config()
            self._agree_on(outcome, verdict.error, verdict.reason, call)

    def time(self) -> None:
        """Time the operators that are right, and what they are compared with."""
        prepared, error = attempt(self.ctx, self._prepare_timing)
        if prepared is None:
            for outcome in self.outcomes.values():
                outcome.failed("error", error)
            return
        subjects, sets = prepared
        timing.measure(self.ctx, subjects, sets, rounds=self.job.rounds, burst=self.job.burst)
        for name, times in timing.slowest_medians(self.ctx, subjects).items():
            self.outcomes.setdefault(name, Outcome(name)).timed(times)

    def close(self) -> None:
        """Give back all buffers, in the order in which they were made."""
        for operator in self.operators.values():
            operator.close()
        self.operators.clear()
        self.ctx.release_operators(captured=True)  # those inside hosts
        self._buffers.clear()
        if not self.ctx.is_interpreted():
            torch.cuda.empty_cache()

    def _right(self) -> list[tuple[str, Operator[Any]]]:
        return [(name, operator) for name, operator in self.operators.items() if self.outcomes[name].status == "ok"]

    def _draw(self, call: int) -> Draw:
        return Draw(self.job.seed, self.problem, call, self.ctx.get_device())

    def _prepare(self, draw: Draw) -> tuple[timing.Operands, dict[str, torch.Tensor], Expectation]:
        operands = self.family.operands(self.problem, self.rank, draw)
        blocks = self.family.blocks(self.problem, self.rank, draw)
        shape = self.problem.c_shape(self.rank)
        read = self.family.read(self.problem, self.rank, draw)
        return operands, read, Expectation(blocks, shape=shape, dtype=self.problem.out_dtype)

    def _poison(self, name: str, operator: Operator[Any]) -> None:
        buffer = self._buffers.get(name, getattr(operator, "output", None))
        if buffer is not None:
            buffer.fill_(math.nan)

    def _call(
        self, name: str, operator: Operator[Any], operands: timing.Operands, read: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return a copy of the output, made in stream order and without a barrier: it must be complete by itself."""
        self._buffers[name] = operator(*operands, **read)
        return operator.as_matrix(self._buffers[name]).clone()

    def _agree_on(self, outcome: Outcome, error: float, reason: str, call: int) -> None:
        answers = self.ctx.control_plane.all_gather([error, reason])
        outcome.error = max([outcome.error or 0.0, *(error for error, _ in answers)])
        wrong = [(rank, reason) for rank, (_, reason) in enumerate(answers) if reason]
        outcome.correct = outcome.correct is not False and not wrong
        if wrong:
            rank, reason = wrong[0]
            outcome.failed("wrong", f"call {call + 1}, rank {rank}: {reason} ({len(wrong)} ranks are wrong)")

    def _prepare_timing(self) -> tuple[list[timing.Subject], list[timing.Operands]]:
        problem, rank, family = self.problem, self.rank, self.family
        sizes = (problem.a_shape(rank), problem.b_shape(rank))
        operand_bytes = sum(rows * columns for rows, columns in sizes) * problem.dtype.itemsize
        count = timing.count_sets(operand_bytes=operand_bytes, cache_bytes=self._cache_bytes())
        draws = [self._draw(_TIMED_CALLS + index) for index in range(count)]
        sets = [family.operands(problem, rank, draw) for draw in draws]
        multiplied = [family.gemm_a(problem, a, draw) for (a, _), draw in zip(sets, draws, strict=True)]
        multiply = _multiplication(problem, multiplied[0], sets[0][1])
        rotating = itertools.cycle(multiplied)
        read = family.read(problem, rank, draws[0])
        communicate = family.communication(self.ctx, problem)
        subjects = [
            timing.Subject(GEMM_ALONE, lambda a, b: multiply(next(rotating), b)),
            timing.Subject(COMMUNICATION_ALONE, lambda a, b: communicate()),
            *(timing.Subject(name, functools.partial(operator, **read)) for name, operator in self._right()),
        ]
        return subjects, sets

    def _cache_bytes(self) -> int:
        if self.ctx.is_interpreted():
            return 0
        return torch.cuda.get_device_properties(self.ctx.get_device()).L2_cache_size


def _multiplication(problem: Any, a: torch.Tensor, b: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return the library's GEMM alone, into memory of its own; these are operands to come."""
    if not is_fp8(problem.dtype):
        product = torch.mm(a, b)
        return lambda a, b: torch.mm(a, b, out=product)
    product = a.new_empty(len(a), b.shape[1], dtype=problem.dtype_of_partials)
    shapes = scale_shapes(problem.scales, tuple(a.shape), tuple(b.shape))
    scales = [torch.ones(shape, device=a.device) for shape in shapes.values()]
    how = {"use_fast_accum": problem.use_fast_accum}
    return lambda a, b: multiply_scaled(a, b, product, problem.scales, *scales, **how)


def attempt(ctx: Context, fn: Callable[..., T], *args: Any) -> tuple[T | None, str]:
    """Do what may fail on all ranks alike; return its result, or None and what every rank failed of; collective.

    Where that differs it is what no ValueError is: those are what a variant cannot do.

    Raises:
        TimeoutError, PeerError: the heap is of no use any more; also where only some ranks failed.
    """
    result, failure = None, ""
    try:
        result = fn(*args)
    except _FATAL:
        raise
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    failures = ctx.control_plane.all_gather(failure)
    if any(failures) and not all(failures):
        rank = next(rank for rank, said in enumerate(failures) if said)
        raise PeerError(f"rank {rank} failed and others did not: {failures[rank]}")
    return (None, min(failures, key=lambda said: said.startswith("ValueError"))) if failure else (result, "")
