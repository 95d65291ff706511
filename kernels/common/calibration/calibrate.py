"""A machine's constants, measured by all its ranks together, in seconds."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from iris_core import AllocationMismatch, Context, PeerError, iris
from iris_core.utils.torch_modes import plain_tensors
from overlap_taxonomy import Machine, assumed_machine
from overlap_taxonomy.fit import solved

from . import timing
from .steps import SMALL, STEPS, Sample, Setting, Sizes, Step

LIMIT_S = 60.0  # for all steps, compiling included: those that have not begun by then are left out
_ROUNDS, _BURST = 5, 10
_STEP_LIMIT_S = 5.0  # for the rounds of a step
_WAIT_LIMIT_S = 30.0  # for a rank that compiles what another has in its cache
_SWEEPS = 2  # a constant's neighbours in a step are known in the second alone
_FATAL = (TimeoutError, PeerError, AllocationMismatch)  # after these, the ranks have no common heap any more

T = TypeVar("T")


@dataclass
class Calibration:
    """What was measured of a machine.

    Args:
        assumed: the machine before.
        constants: those that were measured, by name.
        left: what was not, a line each.
        seconds: how long it took.
    """

    assumed: Machine
    constants: dict[str, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def machine(self) -> Machine:
        """The machine with what was measured."""
        return self.assumed.with_constants(self.constants)


def facts_of(ctx: Context) -> dict[str, Any]:
    """Return what `assumed_machine` takes, of a context's machine; of H200s where there is no GPU."""
    facts = {"world_size": ctx.get_num_ranks(), "is_amd": torch.version.hip is not None}
    if ctx.is_interpreted():
        return facts | {"gpu": "NVIDIA H200", "num_sms": 1, "l2_bytes": 1, "is_hopper": True}
    device = ctx.get_device()
    found = torch.cuda.get_device_properties(device)
    return facts | {
        "gpu": torch.cuda.get_device_name(device),
        "num_sms": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "is_hopper": ctx.get_arch() == "sm_90",
    }


def calibrate(ctx: Context, *, steps: Sequence[Step] = STEPS, limit_s: float = LIMIT_S) -> Calibration:
    """Measure a machine's constants; the same on all ranks; collective.

    It runs in a context of its own, so that what fails in it leaves the given one as it is. A step that fails leaves
    its constants as they are assumed, and a line in `left` says why.

    Args:
        ctx: of the ranks whose machine it is.
        steps: what to measure.
        limit_s: after so long no further step begins.
    """
    start, result = time.monotonic(), Calibration(assumed_machine(**facts_of(ctx)))
    sizes = SMALL if ctx.is_interpreted() else Sizes()
    try:
        with contextlib.ExitStack() as opened, plain_tensors():
            heap_bytes, device = sizes.heap_bytes(ctx.get_num_ranks()), ctx.get_device().type
            own = iris(heap_bytes, device, timeout_s=_WAIT_LIMIT_S, group=ctx.process_group())
            opened.enter_context(own)
            for step in steps:
                if ctx.get_num_ranks() > 1 or not step.has_peers:
                    _take(Setting(own, sizes), step, result, is_late=time.monotonic() - start > limit_s)
    except Exception as error:  # what a context cannot survive, or one that did not open
        result.left.append(" ".join(f"what followed: {type(error).__name__}: {error}".split()))
    if not ctx.is_interpreted():
        torch.cuda.empty_cache()
    constants, left = ctx.broadcast([result.constants, result.left], 0)
    return Calibration(result.assumed, constants, left, time.monotonic() - start)


def _take(setting: Setting, step: Step, result: Calibration, *, is_late: bool) -> None:
    """Take a step, and keep what came out; collective."""
    ctx = setting.ctx
    if any(ctx.control_plane.all_gather(is_late, f"begin to measure {step.name}")):
        result.left.append(f"{step.name}: there was no time left")
        return
    samples, failure = _attempt(ctx, step, lambda: step.prepare(setting))
    times_us: list[float] | None = None
    if samples is not None:
        times_us, failure = _attempt(ctx, step, functools.partial(_times_us, ctx, samples))
    if samples is None or times_us is None:
        result.left.append(f"{step.name}: {failure}")
        return
    found, left = _solved(samples, times_us, result.machine)
    result.constants |= found
    result.left += left


def _attempt(ctx: Context, step: Step, do: Callable[[], T]) -> tuple[T | None, str]:
    """Do a part of a step; return its result, or None and what a rank failed of; collective.

    Raises:
        TimeoutError, PeerError, AllocationMismatch: the ranks have no common heap any more.
    """
    done, failure = None, ""
    try:
        done = do()
    except _FATAL:
        raise
    except Exception as error:  # such as of a kernel that this GPU has no room for
        failure = " ".join(f"{type(error).__name__}: {error}".split())
    failures = [one for one in ctx.control_plane.all_gather(failure, f"measure {step.name}") if one]
    return (None, failures[0]) if failures else (done, "")


def _times_us(ctx: Context, samples: Sequence[Sample]) -> list[float]:
    """Return how long each sample's call takes among others back to back, on the slowest rank; collective."""
    subjects = [timing.Subject(sample.constant, lambda *_, call=sample.call: call()) for sample in samples]
    nothing = torch.empty(0)
    rounds, burst = (1, 1) if ctx.is_interpreted() else (_ROUNDS, _BURST)
    timing.measure(ctx, subjects, [(nothing, nothing)], rounds=rounds, burst=burst, limit_s=_STEP_LIMIT_S)
    times = timing.slowest_medians(ctx, subjects)
    return [times[sample.constant].time_us for sample in samples]


def _solved(
    samples: Sequence[Sample], times_us: Sequence[float], machine: Machine
) -> tuple[dict[str, float], list[str]]:
    """Return the constants that explain the times, and a line for each that nothing explains."""
    found: dict[str, float] = {}
    for _ in range(_SWEEPS):
        left = []
        for sample, us in zip(samples, times_us, strict=True):
            try:
                value = solved(machine.with_constants(found), sample.constant, sample.predict, us)
            except ValueError as error:
                left.append(f"{sample.constant}: {error}")
                found.pop(sample.constant, None)
            else:
                found[sample.constant] = float(f"{value:.4g}")
    return found, left
