"""What one rank does: cut the model for every system, check outputs and gradients against the whole, time them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from iris_kernels.common.calibration import timing
from iris_kernels.common.config import is_fp8
from iris_kernels.common.problem import shard_bounds

from ...command.exits import interrupts_held
from ...measure.job import Judged, attempt, context
from . import float8, models, systems
from .systems import LIMIT, is_sequence

PHASES = ("prefill", "decode", "train")
# A system rounds where the whole model does in the same dtype, and each partial sum once more; with the sums in another
# order its distance to the model in a wider dtype varies by half. What is wrong, such as a stale tile of 256 of 4096
# columns in one of four layers, is farther off by more.
ROUNDING = 3.0
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_WARM_UPS = 2  # calls on a stream before it is measured, and on another one before a capture

Call = Callable[[], list[torch.Tensor]]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Job:
    """One step of a model, in all systems and modes.

    Args:
        pairs: of system and mode.
        unsupported: of those the ones that cannot be measured, and why.
        dtype: as torch names it; of fp8 that of linear layers' operands.
        timed: whether it is, or only checked.
    """

    model: str
    layers: int
    phase: str
    batch: int
    sequence: int
    pairs: Pairs
    unsupported: tuple[tuple[str, str, str], ...]
    dtype: str
    rounds: int
    burst: int
    seed: int
    timed: bool

    @property
    def tokens(self) -> int:
        """Tokens of each sequence that a step is given."""
        return 1 if self.phase == "decode" else self.sequence

    @property
    def in_fp8(self) -> bool:
        """Whether linear layers multiply in fp8; all else is in bf16 then."""
        return is_fp8(getattr(torch, self.dtype))

    @property
    def keeps_fp8(self) -> bool:
        """Whether their weights are kept in fp8; in training they are quantised in each call."""
        return self.in_fp8 and self.phase != "train"

    @property
    def dtype_of_x(self) -> torch.dtype:
        """That of what goes from layer to layer."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.bfloat16 if self.in_fp8 else dtype


@dataclass
class Outcome(Judged):
    """What came of one system in one mode; the names are those of `DecoderRecord`."""

    system: str
    mode: str
    time_min_us: float | None = None
    time_max_us: float | None = None
    peak_bytes: int | None = None

    def failed(self, status: str, reason: str) -> None:
        """As of all that is measured; there is no range of times either."""
        super().failed(status, reason)
        self.time_min_us = self.time_max_us = None


def not_begun(job: Job, reason: str) -> list[Outcome]:
    """Return the outcomes of a job that could not be begun, or was not ended."""
    outcomes = [Outcome(system, mode) for system, mode in job.pairs]
    reasons = {(system, mode): why for system, mode, why in job.unsupported}
    for one in outcomes:
        why = reasons.get((one.system, one.mode))
        one.failed(*(("unsupported", why) if why else ("error", reason)))
    return outcomes


def measure(rank: int, world_size: int, job: Job) -> list[Outcome]:
    """Return the outcome of each system and mode, the same on every rank; collective.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
        PeerError: a rank died, or failed alone.
    """
    if len(job.unsupported) == len(job.pairs):
        return not_begun(job, "")
    run, error = attempt(context(), _Run, job)
    if run is None:
        return not_begun(job, error)
    outcomes = run.measure()
    run.close()
    return outcomes


class _Run:
    """One job on one rank."""

    def __init__(self, job: Job) -> None:
        self.ctx, self.job, self.dtype = context(), job, job.dtype_of_x
        self.device, sizes = self.ctx.get_device(), models.MODELS[job.model]
        self.random = torch.Generator(self.device).manual_seed(job.seed)
        self.whole = models.make_model(sizes, job.layers, self.device, job.seed)
        first = job.sequence if job.phase == "decode" else 0
        positions = torch.arange(first, first + job.tokens, device=self.device)[None]
        shape = (job.batch, job.tokens, sizes.width)
        with torch.no_grad():
            self.angles = self.whole.rotary_emb(torch.empty(1, device=self.device), positions)
        self.whole.to(self.dtype)
        if job.keeps_fp8:
            float8.quantise_weights(self.whole, self.ctx)
        self.drawn = [[self._draw(*shape) for _ in range(2)] for _ in range(2)]  # of x and gradient
        self.past: list[models.Past] = []
        if job.phase == "decode":
            cached = (job.batch, sizes.key_value_heads, job.sequence + 1, sizes.head_width)
            self.past = [models.Past(self._draw(*cached), self._draw(*cached)) for _ in range(job.layers)]
        self.given: dict[bool, list[torch.Tensor]] = {}  # what steps read, by whether it is this rank's part
        self.sharded: dict[str, Any] = {}
        self.compiled: dict[str, models.Block] = {}

    def measure(self) -> list[Outcome]:
        """Check all systems, time those that are right, and check them once more; collective."""
        outcomes, calls = not_begun(self.job, ""), {}
        expected, error = attempt(self.ctx, self._expected)
        for one in outcomes:
            if one.status == "unsupported":
                continue
            one.status, one.reason = "ok", ""
            if expected is None:
                one.failed("error", error)
            elif call := self._made(one):
                self._check(one, call, expected)
                if one.status == "ok":
                    calls[one.system, one.mode] = call
        if self.job.timed and calls:
            self._time([one for one in outcomes if (one.system, one.mode) in calls], calls, expected)
        return outcomes

    def close(self) -> None:
        """Give back what the systems took; collective."""
        self.sharded.clear()
        self.compiled.clear()
        with interrupts_held():
            torch.compiler.reset()
            gc.collect()  # graphs of NCCL's calls, which NCCL does not end before
        self.ctx.release_operators(captured=True)
        if not self.ctx.is_interpreted():
            torch.cuda.empty_cache()

    def _made(self, outcome: Outcome) -> Call | None:
        """Return what makes one step, called before; collective."""
        system, mode = outcome.system, outcome.mode
        if system not in self.sharded:
            model, error = attempt(self.ctx, self._parallelise, system)
            if model is None:
                outcome.failed("error", error)
                return None
            self.sharded[system] = model
        call, error = attempt(self.ctx, self._call_of, system, mode, self.sharded[system])
        if call and system == "async_tp":  # before a capture, as a graph's replay calls no operators
            said, error = attempt(self.ctx, systems.why_not_fused, call, self.job.in_fp8)
            if reasons := [reason for reason in self.ctx.control_plane.all_gather(said) if reason]:
                outcome.failed("unsupported", reasons[0])
                return None
        if call and not error and mode.endswith("replayed"):
            call, error = attempt(self.ctx, _captured, call)
        if error:
            outcome.failed("error", error)
            return None
        return call

    def _parallelise(self, system: str) -> Any:
        job = self.job
        tokens, gradients = job.batch * job.tokens, job.phase == "train"
        how: dict[str, Any] = {"tokens": tokens, "gradients": gradients, "in_fp8": job.in_fp8}
        return systems.parallelise(self.ctx, system, self.whole, **how)

    def _call_of(self, system: str, mode: str, model: Any) -> Call:
        block: models.Block = models.block
        if mode.startswith("compiled"):
            block = self.compiled.setdefault(system, systems.compiled(system))
        given = self._given(is_sequence(system))
        past = [models.Past(self._own(one.keys, 1), self._own(one.values, 1)) for one in self.past]
        angles = self._angles_in(self.dtype)

        def call() -> list[torch.Tensor]:
            return self._step(model, block, given, angles, past)

        for _ in range(_WARM_UPS):
            call()
        return call

    def _angles_in(self, dtype: torch.dtype) -> models.Angles:
        """Return cos and sin of the positions in a dtype."""
        cos, sin = self.angles
        return cos.to(dtype), sin.to(dtype)

    def _step(
        self, model: Any, block: models.Block, given: Sequence[torch.Tensor], angles: models.Angles, past: Any
    ) -> list[torch.Tensor]:
        """Return the output, and in training the gradients of x and of all parameters."""
        x, grad = given
        if self.job.phase != "train":
            with torch.no_grad():
                return [_arrived(models.run(model, block, x, angles, past))]
        leaf = x.detach().requires_grad_()
        output = models.run(model, block, leaf, angles, ())
        gradients = torch.autograd.grad(output, [leaf, *models.parameters(model).values()], grad)
        return [_arrived(one) for one in (output.detach(), *gradients)]

    def _given(self, own: bool) -> list[torch.Tensor]:
        if own not in self.given:
            self.given[own] = [self._part(one, own) for one in self.drawn[0]]
        return self.given[own]

    def _load(self, number: int) -> None:
        """Write one of the two sets of x and gradient to where steps read it."""
        for own, given in self.given.items():
            for one, drawn in zip(given, self.drawn[number], strict=True):
                one.copy_(self._part(drawn, own))

    def _part(self, whole: torch.Tensor, own: bool) -> torch.Tensor:
        return self._own(whole, 1) if own else whole.clone()

    def _own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a copy of this rank's part."""
        first, end = shard_bounds(whole.shape[dim], self.ctx.get_num_ranks(), self.ctx.get_rank())
        return whole.narrow(dim, first, end - first).clone(memory_format=torch.contiguous_format)

    def _check(self, outcome: Outcome, call: Call, expected: list[tuple[torch.Tensor, float]]) -> None:
        """Make a step of other data and one of those whose results are known, and judge it; collective."""
        self._load(1)
        _, error = attempt(self.ctx, call)
        self._load(0)
        found, error = (None, error) if error else attempt(self.ctx, call)
        farthest: tuple[float, str] | None = None
        if found is not None and outcome.system != LIMIT:
            farthest, error = attempt(self.ctx, self._farthest, outcome.system, found, expected)
        if error:
            outcome.failed("error", error)
        elif farthest is not None:
            distance, name = max(self.ctx.control_plane.all_gather(farthest))
            outcome.error = max(outcome.error or 0.0, distance)
            if distance > 1.0:
                outcome.failed("wrong", f"a row of {name} is off by {distance:.3g} times what rounding allows")

    def _expected(self) -> list[tuple[torch.Tensor, float]]:
        """Return what the whole model gives in a wider dtype, and how far one in this dtype may be from it.

        In fp8 the model in the wider dtype has the same weights, and quantises nothing.
        """
        wider, narrow, model = _WIDER[self.dtype], self.whole, copy.deepcopy(self.whole)
        if self.job.keeps_fp8:
            narrow = float8.as_whole(copy.deepcopy(self.whole))
            float8.dequantise_weights(model, wider)
        elif self.job.in_fp8:
            narrow = float8.trained(copy.deepcopy(self.whole), self.ctx)
        own = self._step(narrow, models.block, self.drawn[0], self._angles_in(self.dtype), self._copied(self.dtype))
        model, given = model.to(wider), [one.to(wider) for one in self.drawn[0]]
        wide = self._step(model, models.block, given, self._angles_in(wider), self._copied(wider))
        step = torch.finfo(self.dtype).eps
        return [(to, ROUNDING * max(_off(one, to), step)) for one, to in zip(own, wide, strict=True)]

    def _copied(self, dtype: torch.dtype) -> list[models.Past]:
        """Return the whole past in a dtype, to write to."""
        return [models.Past(one.keys.to(dtype, copy=True), one.values.to(dtype, copy=True)) for one in self.past]

    def _farthest(
        self, system: str, found: Sequence[torch.Tensor], expected: Sequence[tuple[torch.Tensor, float]]
    ) -> tuple[float, str]:
        """Return how far the worst tensor is off, in parts of what it may be, and which that is; collective."""
        names = ["the output", *[f"the gradient of {name}" for name in ("x", *models.parameters(self.whole))]]
        worst = 0.0, names[0]
        for number, (one, (to, allowed)) in enumerate(zip(found, expected, strict=True)):
            if number < 2 and is_sequence(system):  # the output, and the gradient of x
                to = self._own(to, 1)
            elif isinstance(one, DTensor):
                one = one.full_tensor()
            elif system == "iris_sequence":  # of a norm, whose gradient is of this rank's tokens
                one = one.to(to.dtype)
                torch.distributed.all_reduce(one, group=self.ctx.process_group())
            off = _off(one, to) / allowed if one.shape == to.shape else float("inf")
            worst = max(worst, (off if off == off else float("inf"), names[number]))
        return worst

    def _time(self, outcomes: Sequence[Outcome], calls: dict[tuple[str, str], Call], expected: Any) -> None:
        """Time what is right; collective."""
        timed = [timing.Subject(f"{one.system} {one.mode}", _ignoring(calls[one.system, one.mode])) for one in outcomes]
        x, grad = self.drawn[0]
        options = {"rounds": self.job.rounds, "burst": self.job.burst}
        _, error = attempt(self.ctx, lambda: timing.measure(self.ctx, timed, [(x, grad)], **options))
        times = {} if error else timing.slowest_medians(self.ctx, timed)
        ranges = {} if error else timing.slowest_ranges(self.ctx, timed)
        for one, subject in zip(outcomes, timed, strict=True):
            if error:
                one.failed("error", error)
                continue
            one.timed(times[subject.name])
            one.time_min_us, one.time_max_us = ranges[subject.name]
            call = calls[one.system, one.mode]
            self._check(one, call, expected)
            if not self.ctx.is_interpreted():
                peak, _ = attempt(self.ctx, self._peak_bytes, call, self.sharded[one.system])
                one.peak_bytes = max(self.ctx.control_plane.all_gather(peak or 0)) or None

    def _peak_bytes(self, call: Call, model: Any) -> int:
        """Return what a step holds: parameters, and what it allocates."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        local = [one.to_local() if isinstance(one, DTensor) else one for one in models.parameters(model).values()]
        held = getattr(call, "graph_bytes", 0)
        return sum(one.nbytes for one in local) + held + torch.cuda.max_memory_allocated() - before

    def _draw(self, *shape: int) -> torch.Tensor:
        """Return the same values on every rank."""
        return torch.randn(*shape, generator=self.random, device=self.device, dtype=self.dtype)


def _off(found: torch.Tensor, to: torch.Tensor) -> float:
    """Return ‖found − to‖ of the worst row, in parts of the row's norm, or of the rows' mean where that is larger."""
    norms = to.norm(dim=-1)
    mean = norms.square().mean().sqrt()
    return ((found.to(to.dtype) - to).norm(dim=-1) / norms.clamp(min=mean).clamp(min=1e-30)).max().item()


def _ignoring(call: Call) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return a call that reads what the step was made for, whatever it is given."""
    return lambda x, grad: call()


class _Replay:
    """A step's CUDA graph, as a call: results are in the same memory each time."""

    def __init__(self, call: Call) -> None:
        self._call = call  # holds what the graph reads and writes
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # as a capture is not on the stream that work usually is on
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # a thread of NCCL's asks for events
            self._results = call()
        self.graph_bytes = torch.cuda.max_memory_allocated() - before

    def __call__(self) -> list[torch.Tensor]:
        self._graph.replay()
        return self._results


def _captured(call: Call) -> Call:
    return _Replay(call)


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return what torch's collectives gave once the stream has waited for it, as whoever reads it would."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
