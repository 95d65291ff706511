"""One rank's part: make the layers of every subject, check outputs and gradients against the whole, time them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

import iris_core
from iris_core import AllocationMismatch, PeerError
from iris_kernels.common.problem import shard_bounds

from .. import timing
from ..measure import context
from . import subjects
from .subjects import ALONE, Pair

PHASES = ("forward", "step")
# ‖found − expected‖ / ‖expected‖: between the products there is rounding to the dtype; in fp32 sums have other orders.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
_FATAL = (TimeoutError, PeerError, AllocationMismatch)
_SETS = 3  # of x and gradient to rotate through

Call = Callable[[torch.Tensor, torch.Tensor], Any]


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
class Outcome:
    """What came of one subject in one phase; the names are those of `LayersRecord`."""

    subject: str
    phase: str
    status: str = "ok"
    reason: str = ""
    error: float | None = None
    time_us: float | None = None
    latency_us: float | None = None
    host_us: float | None = None

    def failed(self, status: str, reason: str) -> None:
        """Keep the first thing that went wrong."""
        if self.status == "ok":
            self.status, self.reason = status, " ".join(reason.split())


def measure(rank: int, world_size: int, job: Job) -> list[Outcome]:
    """Return each subject's outcomes, the same on every rank; collective.

    Raises:
        TimeoutError: a rank waited in vain for another.
        PeerError: a rank died, or failed alone.
    """
    run = _Run(job)
    outcomes = [outcome for phase in job.phases for outcome in run.measure(phase)]
    run.close()
    return outcomes


class _Run:
    """One job on one rank."""

    def __init__(self, job: Job) -> None:
        self.ctx, self.job, self.dtype = context(), job, getattr(torch, job.dtype)
        torch._dynamo.reset()  # of the job before: what is compiled is of one size
        self.random = torch.Generator(self.ctx.get_device()).manual_seed(job.seed)
        up = self._draw(job.features, job.width) / job.width**0.5
        down = self._draw(job.width, job.features) / job.features**0.5
        self.whole = Pair(up.to(self.dtype), down.to(self.dtype))
        self.sets = [tuple(self._draw(job.tokens, job.width).to(self.dtype) for _ in range(2)) for _ in range(_SETS)]
        self.own_sets: list[timing.Operands] = [(self._own(x), self._own(grad)) for x, grad in self.sets]
        self.layers: dict[str, nn.Module] = {}

    def measure(self, phase: str) -> list[Outcome]:
        """Check and time all subjects in one phase; collective."""
        outcomes = [Outcome(subject, phase) for subject in self.job.subjects]
        expected = self._expected(phase)
        timed, calls = [], []
        for outcome in outcomes:
            call = self._checked(outcome, expected)
            if call:
                timed.append(outcome)
                calls.append(timing.Subject(outcome.subject, call))
        del expected
        timing.measure(self.ctx, calls, self.own_sets, rounds=self.job.rounds, burst=self.job.burst)
        mine = [[asdict(sample) for sample in subject.samples] for subject in calls]
        by_rank = self.ctx.group.all_gather(mine)
        for number, outcome in enumerate(timed):
            for quantity in ("time_us", "latency_us", "host_us"):
                values = [[sample[quantity] for sample in ranks[number]] for ranks in by_rank]
                setattr(outcome, quantity, timing.slowest_median(values))
        return outcomes

    def close(self) -> None:
        """Give back what the layers took; collective."""
        self.layers.clear()
        self.ctx.release_operators()
        if not self.ctx.is_interpreted():
            torch.cuda.empty_cache()

    def _checked(self, outcome: Outcome, expected: list[torch.Tensor]) -> Call | None:
        """Return a subject's call, if it is right; collective."""
        call = self._attempt(outcome, lambda: self._call_of(outcome.subject, outcome.phase))
        if call is None:
            return None
        for x, grad in self.own_sets[::-1]:  # the first again and again, as later calls are: twice at least
            found = self._attempt(outcome, lambda x=x, grad=grad: call(x, grad))  # type: ignore[misc]
            if found is None:
                return None
        if outcome.subject == "async_tp":
            reason = self._attempt(outcome, lambda: subjects.why_not_fused(lambda: call(*self.own_sets[0])))
            if reason:
                outcome.failed("unsupported", reason)
        if outcome.subject != ALONE:
            outcome.error = max(self.ctx.group.all_gather(self._distance(found, expected)))
            limit = TOLERANCES[self.dtype]
            if not outcome.error <= limit:
                outcome.failed("wrong", f"an output or a gradient is off by {outcome.error:.2g}, more than {limit:g}")
        return call if outcome.status == "ok" else None

    def _call_of(self, subject: str, phase: str) -> Call:
        """Return what is timed, which gives the output, and the gradients behind it; collective."""
        if subject not in self.layers:
            self.layers[subject] = subjects.make(self.ctx, subject, self.job.layout, self.whole)
        layers = self.layers[subject]
        run = {"forward": _forward, "step": _step}[phase]
        if subject == ALONE:
            all_tokens = itertools.cycle(self.sets)
            return lambda x, grad: run(layers, layers, *next(all_tokens))
        run(layers, layers, *self.own_sets[0])  # as our layers ask, where a graph is to be whole
        call = subjects.compiled(subject, layers)
        return lambda x, grad: run(layers, call, x, grad)

    def _expected(self, phase: str) -> list[torch.Tensor]:
        """Return this rank's part of what the whole layers give of the first set, in fp32."""
        x, grad = (one.float() for one in self.sets[0])
        whole = copy.deepcopy(self.whole).float()
        leaf = x.requires_grad_()
        output = whole(leaf)
        found = [self._own(output.detach())]
        if phase == "step":
            of_x, *of_parameters = torch.autograd.grad(output, [leaf, *whole.parameters()], grad)
            found += [self._own(of_x), *of_parameters]
        return found

    def _distance(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        distances = []
        for one, other in zip(found, expected, strict=True):
            one = one.full_tensor() if isinstance(one, DTensor) else one
            if one.shape != other.shape:
                return float("inf")
            distances.append(((one.float() - other).norm() / other.norm().clamp(min=1e-30)).item())
        return max(distance if distance == distance else float("inf") for distance in distances)

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the tokens around the pair."""
        if self.job.layout == "replicated":
            return whole
        return whole[slice(*shard_bounds(whole.shape[0], self.ctx.get_num_ranks(), self.ctx.get_rank()))]

    def _draw(self, *shape: int) -> torch.Tensor:
        """Return the same values on every rank."""
        return torch.randn(*shape, generator=self.random, device=self.ctx.get_device())

    def _attempt(self, outcome: Outcome, fn: Callable[[], Any]) -> Any:
        """Return what `fn` gives; None, with the outcome failed, where it raises on every rank; collective."""
        result, status, reason = None, "", ""
        try:
            result = fn()
        except _FATAL:
            raise
        except ValueError as error:
            status, reason = "unsupported", str(error)
        except Exception as error:
            status, reason = "error", f"{type(error).__name__}: {error}"
        everyone = self.ctx.group.all_gather([status, reason])
        failed = [rank for rank, (status, _) in enumerate(everyone) if status]
        if failed and len(failed) < len(everyone):
            raise iris_core.PeerError(f"rank {failed[0]} failed and others did not: {everyone[failed[0]][1]}")
        if failed:
            outcome.failed(*everyone[0])
        return result


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
