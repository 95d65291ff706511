"""Fitting a machine's constants to measured times, and how far predictions are from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .machine import Machine
from .model import predict_us
from .work import Work

FIXED = {"num_sms", "world_size", "fp32_tflops"}  # what is counted, or is not in the measurements
_SHARES = {"hot_share", "portable_rate", "spare_power", "stall_share"}  # at most 1
_WORST = 0.5  # a time that is off by more counts no more than this: patterns the model has no constant for
_STEPS = (1.3, 1.1, 1.03, 1.01)
FARTHEST_MEASURED = 10.0  # from what was assumed, of a constant that is measured by itself
_HALVINGS = 30
_NEARLY = 0.05  # that a rate may seem to be above its highest: a GPU that is hot is not slower than it
_FARTHEST = 2.0  # from where a constant starts: what fits best beyond that is no longer what was measured


@dataclass(frozen=True)
class Measurement:
    """A variant's measured time, in µs."""

    variant: str
    work: Work
    us: float


def error_of(machine: Machine, measurement: Measurement) -> float | None:
    """Return how far a prediction is from a measurement, relative to it and signed; None for an unknown variant."""
    predicted = predict_us(machine, measurement.variant, measurement.work)
    return None if predicted is None else predicted / measurement.us - 1


def median_errors(machine: Machine, measurements: Iterable[Measurement]) -> dict[tuple[str, str], float]:
    """Return the median of the errors' sizes, by family and variant; what the model does not know is left out."""
    errors: dict[tuple[str, str], list[float]] = {}
    for measurement in measurements:
        error = error_of(machine, measurement)
        if error is not None:
            errors.setdefault((measurement.work.family, measurement.variant), []).append(abs(error))
    return {key: statistics.median(values) for key, values in errors.items()}


def fit(
    machine: Machine, measurements: Sequence[Measurement], *, keep: Collection[str] = (), rounds: int = 4
) -> Machine:
    """Return the machine with its constants moved to where the predictions fit best.

    One constant after the other is raised or lowered, in ever smaller steps, as long as that helps: they stay what they
    mean, and what no measurement shows stays as it was.

    Args:
        machine: to start from.
        measurements: to fit to.
        keep: constants that stay as they are, because these measurements hardly show them.
        rounds: at most, of each step.

    Raises:
        ValueError: there is no such constant.
    """
    names = [column.name for column in fields(machine) if isinstance(getattr(machine, column.name), float)]
    if unknown := sorted(set(keep) - set(names)):
        raise ValueError(f"unknown constant {unknown[0]!r}; known constants: {', '.join(names)}")
    start, best = machine, _loss(machine, measurements)
    for step in _STEPS:
        for _ in range(rounds):
            before = best
            for name in (name for name in names if name not in FIXED and name not in keep):
                for factor in (step, 1 / step):
                    while (moved := _moved(machine, name, factor, start)) is not None:
                        loss = _loss(moved, measurements)
                        if loss >= best - 1e-6:
                            break
                        machine, best = moved, loss
            if before - best < 1e-4:
                break
    return machine


def solved(machine: Machine, name: str, predict: Callable[[Machine], float], measured_us: float) -> float:
    """Return the value of a constant with which a prediction is what was measured.

    Args:
        machine: the other constants, and where to start.
        name: of the constant, as `Machine.constant` takes it.
        predict: returns a time in µs; it grows with the constant, or falls.
        measured_us: the time.

    Raises:
        ValueError: no value within `FARTHEST_MEASURED` of the constant predicts that, or the time does not depend on
            it. A share is 1 where even that predicts up to `_NEARLY` more than was measured.
    """
    start = machine.constant(name)
    low, high = start / FARTHEST_MEASURED, start * FARTHEST_MEASURED
    if name in _SHARES:
        high = min(high, 1.0)

    def us(value: float) -> float:
        return predict(machine.with_constants({name: value}))

    at_low, at_high = us(low), us(high)
    is_rising = at_low < at_high
    if name in _SHARES and high == 1.0 and at_high / (1 + _NEARLY) <= measured_us < at_high:
        return high
    if not min(at_low, at_high) <= measured_us <= max(at_low, at_high) or at_low == at_high:
        raise ValueError(
            f"{measured_us:.4g} us were measured; with {name} from {low:.3g} to {high:.3g} the model has "
            f"{at_low:.4g} to {at_high:.4g}"
        )
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        at_middle = us(middle)
        # Where something else limits the time, the constant is the one at which that begins.
        is_below = at_middle <= measured_us if is_rising else at_middle > measured_us
        low, high = (middle, high) if is_below else (low, middle)
    return math.sqrt(low * high)


def _moved(machine: Machine, name: str, factor: float, start: Machine) -> Machine | None:
    value, original = getattr(machine, name) * factor, getattr(start, name)
    if not original / _FARTHEST <= value <= original * _FARTHEST or (name in _SHARES and value > 1):
        return None
    changed: Any = {name: float(f"{value:.3g}")}
    return replace(machine, **changed)


def _loss(machine: Machine, measurements: Sequence[Measurement]) -> float:
    losses = []
    for measurement in measurements:
        predicted = predict_us(machine, measurement.variant, measurement.work)
        if predicted is not None:
            losses.append(min(_WORST, abs(math.log(predicted / measurement.us))))
    return statistics.fmean(losses) if losses else 0.0
