"""What one rank does: make the layers of every subject, check outputs and gradients against the whole, time them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from iris_kernels.common.calibration import timing
from iris_kernels.common.problem import shard_bounds

from ...command.exits import interrupts_held
from ...measure.job import Judged, attempt, context
from . import subjects
from .subjects import ALONE, Pair

PHASES = ("forward", "step")
# Of every row's ‖found − expected‖ / ‖expected‖: between the products there is rounding to the dtype; fp32 sums in
# another order. A stale tile of 256 columns is a quarter of a row of 4096.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
_SETS = 3  # of x and gradient to rotate through

Call = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class Job:
    """One pair of layers, in one layout.

    Args:
        tokens, width, features: of all ranks.
        dtype: as torch names it.
    """

    tokens: int
    width: int
    features: int
    layout: str
    phases: tuple[str, ...]
    subjects: tuple[str, ...]
    dtype: str
    rounds: int
    burst: int
    seed: int


@dataclass
class Outcome(Judged):
    """What came of one subject in one phase; the names are those of `LayersRecord`."""

    subject: str
    phase: str


def not_begun(job: Job, reason: str) -> list[Outcome]:
    """Return the outcomes of a job that could not be begun, or was not ended."""
    return [Outcome(subject, phase, status="error", reason=reason) for phase in job.phases for subject in job.subjects]


def measure(rank: int, world_size: int, job: Job) -> list[Outcome]:
    """Return each subject's outcomes, the same on every rank; collective.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
        PeerError: a rank died, or failed alone.
    """
    run, error = attempt(context(), _Run, job)
    if run is None:
        return not_begun(job, error)
    outcomes = [outcome for phase in job.phases for outcome in run.measure(phase)]
    run.close()
    return outcomes


class _Run:
    """One job on one rank."""

    def __init__(self, job: Job) -> None:
        self.ctx, self.job, self.dtype = context(), job, getattr(torch, job.dtype)
        self.random = torch.Generator(self.ctx.get_device()).manual_seed(job.seed)
        up = self._draw(job.features, job.width) / job.width**0.5
        down = self._draw(job.width, job.features) / job.features**0.5
        self.whole = Pair(up.to(self.dtype), down.to(self.dtype))
        whole_sets = [[self._draw(job.tokens, job.width).to(self.dtype) for _ in range(2)] for _ in range(_SETS)]
        self.sets: list[timing.Operands] = [(self._own(x), self._own(grad)) for x, grad in whole_sets]
        self.whole_of = {own[0].data_ptr(): whole for own, whole in zip(self.sets, whole_sets, strict=True)}
        self.layers: dict[str, nn.Module] = {}

    def measure(self, phase: str) -> list[Outcome]:
        """Check all subjects in one phase, time them, and check them once more; collective."""
        outcomes = [Outcome(subject, phase) for subject in self.job.subjects]
        expected, error = attempt(self.ctx, self._expected, phase)
        calls: dict[str, Call] = {}
        for outcome in outcomes:
            if expected is None:
                outcome.failed("error", error)
            elif call := self._made(outcome):
                for x, grad in self.sets[::-1]:
                    self._check(outcome, call, x, grad, expected if x is self.sets[0][0] else None)
                if outcome.status == "ok":
                    calls[outcome.subject] = call
        timed = [timing.Subject(name, call) for name, call in calls.items()]
        timing.measure(self.ctx, timed, self.sets, rounds=self.job.rounds, burst=self.job.burst)
        times = timing.slowest_medians(self.ctx, timed)
        for outcome in outcomes:
            if outcome.subject in calls:
                outcome.timed(times[outcome.subject])
                x, grad = self.sets[0]
                self._check(outcome, calls[outcome.subject], x, grad, expected)
        return outcomes

    def close(self) -> None:
        """Give back what the layers took; collective."""
        self.layers.clear()
        with interrupts_held():
            torch.compiler.reset()  # what is compiled is of one size, and NCCL does not end before graphs of its calls
            gc.collect()
        self.ctx.release_operators(captured=True)
        if not self.ctx.is_interpreted():
            torch.cuda.empty_cache()

    def _made(self, outcome: Outcome) -> Call | None:
        """Return a subject's call, if there is one here; collective."""
        layers, error = self.layers.get(outcome.subject), ""
        if layers is None:
            layers, error = attempt(self.ctx, subjects.make, self.ctx, outcome.subject, self.job.layout, self.whole)
            if layers is None:
                outcome.failed("unsupported" if error.startswith("ValueError") else "error", error)
                return None
            self.layers[outcome.subject] = layers
        call, error = attempt(self.ctx, self._call_of, outcome.subject, outcome.phase, layers)
        if call is None:
            outcome.failed("error", error)
        elif outcome.subject == "async_tp":
            self._look_whether_fused(outcome, call)
        return call

    def _look_whether_fused(self, outcome: Outcome, call: Call) -> None:
        times = {"forward": 1, "step": 2}[outcome.phase]
        reason, error = attempt(self.ctx, subjects.why_not_fused, lambda: call(*self.sets[0]), times)
        if reason is None:
            outcome.failed("error", error)
        elif reasons := [said for said in self.ctx.control_plane.all_gather(reason) if said]:
            outcome.failed("unsupported", reasons[0])

    def _call_of(self, subject: str, phase: str, layers: nn.Module) -> Call:
        """Return what is timed, which gives the output, and the gradients after it; collective."""
        run = {"forward": _forward, "step": _step}[phase]
        if subject == ALONE:
            return lambda x, grad: run(layers, layers, *self.whole_of[x.data_ptr()])
        run(layers, layers, *self.sets[0])  # as our layers ask, where a graph is to be whole
        call = subjects.compiled(subject, layers)
        return lambda x, grad: run(layers, call, x, grad)

    def _check(
        self, outcome: Outcome, call: Call, x: torch.Tensor, grad: torch.Tensor, expected: list[torch.Tensor] | None
    ) -> None:
        """Call a subject, if it is right so far, and judge what it gives if that is known; collective."""
        if outcome.status != "ok":
            return
        found, error = attempt(self.ctx, call, x, grad)
        distance: float | None = None
        if found is not None and expected is not None:
            distance, error = attempt(self.ctx, self._distance, outcome.subject, found, expected)
        if error:
            outcome.failed("error", error)
        elif expected is not None:
            outcome.error = max([outcome.error or 0.0, *self.ctx.control_plane.all_gather(distance)])
            limit = TOLERANCES[self.dtype]
            if outcome.error > limit:
                outcome.failed("wrong", f"a row is off by {outcome.error:.2g} of its norm, more than {limit:g}")

    def _expected(self, phase: str) -> list[torch.Tensor]:
        """Return this rank's shard of what the whole layers give of the first set, in fp32."""
        x, grad = (one.float() for one in self.whole_of[self.sets[0][0].data_ptr()])
        whole = copy.deepcopy(self.whole).float()
        leaf = x.clone().requires_grad_()
        output = whole(leaf)
        found = [self._own(output.detach())]
        if phase == "step":
            of_x, *of_parameters = torch.autograd.grad(output, [leaf, *whole.parameters()], grad)
            found += [self._own(of_x), *of_parameters]
        return found

    def _distance(self, subject: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        """Return how far the worst row of all tensors is off, in parts of its norm; collective."""
        if subject == ALONE:  # whose sum over the ranks is the output
            output = found[0].float()
            torch.distributed.all_reduce(output, group=self.ctx.process_group())
            found, expected = [self._own(output)], expected[:1]
        worst = 0.0
        for one, other in zip(found, expected, strict=True):
            one = one.full_tensor() if isinstance(one, DTensor) else one
            distance = float("nan")
            if one.shape == other.shape:
                distance = ((one.float() - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-30)).max().item()
            worst = max(worst, distance) if distance == distance else float("inf")
        return worst

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the tokens around the pair."""
        if self.job.layout == "replicated":
            return whole
        return whole[slice(*shard_bounds(whole.shape[0], self.ctx.get_num_ranks(), self.ctx.get_rank()))]

    def _draw(self, *shape: int) -> torch.Tensor:
        """Return the same values on every rank."""
        return torch.randn(*shape, generator=self.random, device=self.ctx.get_device())


def _forward(layers: nn.Module, call: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, in a list; `call` are the layers, or what was compiled of them."""
    with torch.inference_mode():
        return [_arrived(call(x))]


def _step(layers: nn.Module, call: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of x and of the layers' parameters."""
    leaf = x.detach().requires_grad_()
    output = call(leaf)
    return [_arrived(one) for one in (output, *torch.autograd.grad(output, [leaf, *layers.parameters()], grad))]


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return what torch's collectives gave once the stream has waited for it, as whoever reads it would."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
