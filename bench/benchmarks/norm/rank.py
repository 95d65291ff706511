"""One rank's part: call each way to sum, add a residual and norm, check what comes, time it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from iris_core import Context
from iris_kernels.common.calibration import timing
from iris_kernels.common.device.epilogue import epilogue_arguments, epilogue_ops
from iris_kernels.common.portable.row_norm import RmsNorm, normed_rows
from overlap_taxonomy import get_variant

from ...measure.correctness import Expectation
from ...measure.families import FAMILIES
from ...measure.inputs import Draw
from ...measure.job import attempt, context
from ...measure.shapes import Shape
from ..ccl.rank import captured
from .others import OTHERS
from .record import Outcome

EPS = 1e-5
_LIMIT_S = 1.0  # of timing one problem
Outputs = Sequence[torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor], Outputs]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        family, shape: the product.
        variants: of ours, by name.
        normed_dtype: as torch names it; "" for C's, bf16.
        rounds: most samples of each; fewer where they take long.
        burst: calls of a sample.
        seed: of the inputs.
    """

    family: str
    shape: Shape
    variants: tuple[str, ...]
    normed_dtype: str
    rounds: int
    burst: int
    seed: int


class Way(NamedTuple):
    """Fields of `Outcome`."""

    way: str
    variant: str
    mode: str


def ways(plan: Plan) -> list[tuple[str, str]]:
    """Return the ways that a problem is measured in, each with the variant of ours; "" of others'."""
    found = [("library", ""), *((way, one) for one in plan.variants for way in ("unfused", "fused"))]
    if plan.family == "gemm_all_reduce":
        found += [(way, "") for way, other in OTHERS.items() if other.quantises or not plan.normed_dtype]
    return found


def measure(rank: int, world_size: int, plan: Plan) -> list[Outcome]:
    """Return all measurements of a problem, the same on every rank; collective.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
        PeerError: a rank failed alone.
    """
    return _Run(context(), plan).measured()


class _Run:
    """One problem on one rank."""

    def __init__(self, ctx: Context, plan: Plan) -> None:
        self.ctx, self.plan, self.rank = ctx, plan, ctx.get_rank()
        self.family = FAMILIES[plan.family]
        m, n, k = plan.shape.m, plan.shape.n, plan.shape.k
        self.plain = self.family.problem(m=m, n=n, k=k, world_size=ctx.get_num_ranks(), dtype=torch.bfloat16)
        self.summed = replace(self.plain, epilogue=("residual",))
        dtype = getattr(torch, plan.normed_dtype) if plan.normed_dtype else None
        self.normed = replace(self.summed, norm=RmsNorm(EPS, dtype))
        self.read = self.family.read_by_epilogue(self.normed, self.rank, self._draw(0))
        self.outcomes: dict[Way, Outcome] = {}
        self.subjects: list[timing.Subject] = []
        self.operators: list[Any] = []
        self.closed_after: list[Callable[[], None]] = []

    def measured(self) -> list[Outcome]:
        """Check and time every way."""
        plan, shape = self.plan, self.normed.b_shape(self.rank)
        weight_bytes = shape[0] * shape[1] * self.normed.dtype.itemsize
        sets = timing.count_sets(operand_bytes=weight_bytes, cache_bytes=self._cache_bytes())
        operands = [self.family.operands(self.normed, self.rank, self._draw(number)) for number in range(sets)]
        blocks = self.family.blocks(self.summed, self.rank, self._draw(0))
        expectation = Expectation(blocks, shape=self.normed.c_shape(self.rank), dtype=self.normed.out_dtype)
        for way, variant in ways(plan):
            self._add(way, variant, operands, expectation)
        timing.measure(self.ctx, self.subjects, operands, rounds=plan.rounds, burst=plan.burst, limit_s=_LIMIT_S)
        times = timing.slowest_medians(self.ctx, self.subjects)
        rounds = {subject.name: len(subject.samples) for subject in self.subjects}
        for named, outcome in self.outcomes.items():
            if found := times.get(str(named)):
                taken = {"time_us": found.time_us, "latency_us": found.latency_us, "host_us": found.host_us}
                self.outcomes[named] = replace(outcome, **taken, reason=found.remark, rounds=rounds[str(named)])
        self.subjects.clear()  # graphs, before what they use
        for close in (*self.closed_after, *(operator.close for operator in self.operators)):
            close()
        return list(self.outcomes.values())

    def _add(self, way: str, variant: str, operands: list[timing.Operands], expectation: Expectation) -> None:
        """Check a way, eager and in graphs, and have what is right timed."""
        modes = ("eager",) if self.ctx.is_interpreted() else ("eager", "graph")
        reason, call = self._reason(way, variant), None
        status = "unsupported" if reason else "error"
        if not reason:
            call, reason = attempt(self.ctx, self._made, way, variant)
        for mode in modes:
            queued = call
            if queued is not None and mode == "graph":
                queued, reason = attempt(self.ctx, _in_graphs, queued, operands)
            if queued is not None:
                found, reason = attempt(self.ctx, self._fault, queued, operands[0], expectation)
                reasons = [one for one in self.ctx.control_plane.all_gather(reason or found) if one]
                status, reason = ("wrong" if found is not None else "error", reasons[0]) if reasons else ("ok", "")
            plan, shape, named = self.plan, self.plan.shape, Way(way, variant, mode)
            sizes = (plan.family, shape.m, shape.n, shape.k)
            times = (None, None, None)
            config = self.operators[-1].describe_config() if call and way in ("fused", "unfused") else ""
            self.outcomes[named] = Outcome(
                *sizes, *named, plan.normed_dtype, *times, status, plan.rounds, reason, config
            )
            if status != "ok":
                call = None
            elif queued is not None:
                self.subjects.append(timing.Subject(str(named), queued))

    def _reason(self, way: str, variant: str) -> str:
        """Return why a way cannot be had, or ""."""
        if way in OTHERS:
            return OTHERS[way].missing_reason()
        problem = self.plain if way == "unfused" else self.normed
        return get_variant(self.plan.family, variant or "library").unsupported_reason(problem, None) or ""

    def _made(self, way: str, variant: str) -> Call:
        """Return what calls a way; collective."""
        if way in OTHERS:
            fusion = OTHERS[way].make(self.ctx, self.normed, self.read)
            self.closed_after.append(fusion.close)
            return fusion.call
        problem = self.plain if way == "unfused" else self.normed
        operator = get_variant(self.plan.family, variant or "library").build(self.ctx, problem, new_outputs=True)
        self.operators.append(operator)
        if way != "unfused":
            return lambda a, b: operator.call(a, b, **self.read)
        residual, weight, norm = self.read["residual"], self.read["norm_weight"], self.normed.norm
        return lambda a, b: add_and_norm(operator(a, b), residual, weight, norm)

    def _fault(self, call: Call, operands: timing.Operands, expectation: Expectation) -> str:
        """Return what is wrong with what a call gives, or ""."""
        *c, normed = outputs = [one.clone() for one in call(*operands)]
        scales: Any = 1.0
        if self.plan.normed_dtype:
            *c, normed, scales = outputs
        if c and not (verdict := expectation.judge(c[0])).correct:
            return verdict.reason
        summed, weight = (c[0] if c else expectation.elements()[0]), self.read["norm_weight"]
        expected = torch.nn.functional.rms_norm(summed.float(), weight.shape, weight.float(), EPS)
        # Twice the rounding of the result; where C was not returned, some of its own, too.
        eps = torch.finfo(normed.dtype).eps * (1 if c else 8)
        wrong = ((normed.float() * scales - expected).abs() > eps * (expected.abs() + (0 if c else 1)) + 1e-5).sum()
        if self.plan.normed_dtype:
            least = torch.finfo(normed.dtype).smallest_normal * scales
            wrong = ((normed.float() * scales - expected).abs() > eps * expected.abs() + least).sum()
        return f"{int(wrong)} of {normed.numel()} normed elements are wrong" if wrong else ""

    def _draw(self, number: int) -> Draw:
        return Draw(self.plan.seed, self.plain, number, self.ctx.get_device())

    def _cache_bytes(self) -> int:
        if self.ctx.is_interpreted():
            return 0
        return torch.cuda.get_device_properties(self.ctx.get_device()).L2_cache_size


def add_and_norm(c: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, norm: RmsNorm) -> Outputs:
    """Add a residual to a C in place, and norm it, in one kernel: what is behind a collective where nothing is fused.

    Returns:
        C, the normed rows, and with a dtype of the norm's own their scales.
    """
    added = epilogue_arguments(("residual",), {"residual": residual})
    ops = tuple(op.apply for op in epilogue_ops(("residual",)))
    return (c, *normed_rows(c, weight, norm, added, ops))


def _in_graphs(call: Call, sets: list[timing.Operands]) -> Call:
    """Return what replays a graph of a call with each of these operands."""
    graphs = {b.data_ptr(): _in_graph(call, a, b) for a, b in sets}
    return lambda a, b: graphs[b.data_ptr()]()


def _in_graph(call: Call, a: torch.Tensor, b: torch.Tensor) -> Callable[[], Outputs]:
    call(a, b)  # what compiles, or makes room, before it is captured
    outputs: list[Outputs] = []
    replay = captured(lambda: outputs.append(call(a, b)))

    def replayed() -> Outputs:
        replay()
        return outputs[0]

    return replayed
