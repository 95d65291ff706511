"""Predicted times of a problem that was not measured, corrected by problems that were, and how far off they may be.

Where the model is off, it is off by nearly as much on the next problem: how much is a Gaussian process over the
logarithms of a rank's sizes and of the number of ranks, in closed form. There is one for the time of the library
baseline, and one for the ratio of each variant's time to that: their errors have much in common, and what decides a
choice is the ratio. Its standard deviation, the *doubt*, is small near what was measured and grows with the distance.
The constants are those by which measured problems were predicted best that were hidden (docs/design.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from overlap_taxonomy import Machine, Work, machine_for, predict_us

from ..config import DTYPES
from .measured import Key, Measured, Table

NOISE = 0.02  # of a measured time's logarithm, from run to run
SPREAD = 0.27  # of the logarithm of measured over predicted, where nothing is near
BLIND = 0.5  # the same where nothing was measured on such machines at all
_ROWS, _WEIGHT, _RANKS = 8.0, 8.0, 1.5  # doublings after which problems have 1/e in common
_OTHER_GPU = 0.15  # another GPU of the same chip is as far as that part of these distances

_ELEMENT_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPES}


@dataclass(frozen=True)
class Evidence:
    """A measured problem, and by how much the model is off there.

    Args:
        gpu, key: where, and what.
        work: the same to the model.
        measured: the times, by variant.
    """

    gpu: str
    key: Key
    work: Work
    measured: Measured

    @functools.cached_property
    def off(self) -> dict[str, float]:
        """The logarithm of measured over predicted time, by variant; with default configurations alone."""
        machine = machine_for(self.gpu, self.key.world_size)
        assert machine is not None
        times = {name: us for name, us in self.measured.times_us.items() if name not in self.measured.configs}
        predicted = {name: predict_us(machine, name, self.work) for name in times}
        return {name: math.log(times[name] / us) for name, us in predicted.items() if us}

    @functools.cached_property
    def place(self) -> tuple[float, ...]:
        """Where the problem is among others."""
        return place_of(self.work)


@dataclass(frozen=True)
class Estimate:
    """What is known of a variant's time.

    Args:
        us: the time, in µs.
        log_ratio: the logarithm of the time over the baseline's.
        doubt: the standard deviation of that.
    """

    us: float
    log_ratio: float
    doubt: float


def evidence_of(tables: Mapping[str, Table]) -> list[Evidence]:
    """Return the measured problems of several kinds of GPUs that the model knows, by the GPU's name."""
    found = []
    for gpu, table in tables.items():
        for key, measured in table.items():
            element_bytes = _ELEMENT_BYTES.get(key.dtype)
            if element_bytes and machine_for(gpu, key.world_size):
                work = Work(key.family, key.m, key.n, key.k, key.world_size, element_bytes)
                found.append(Evidence(gpu, key, work, measured))
    return found


def place_of(work: Work) -> tuple[float, ...]:
    """Return where a problem is among others, along axes on which these have 1/e in common at a distance of 1."""
    m, n, k = (math.log2(size) for size in work.product)
    return m / _ROWS, n / _WEIGHT, k / _WEIGHT, math.log2(work.world_size) / _RANKS


def is_narrow(work: Work) -> bool:
    """Whether rows of A or of the output are not on 16 bytes: the model is off otherwise than where they are."""
    return work.reads_narrow_rows or work.is_narrow(work.n)


def distance(gpu: str, work: Work, evidence: Evidence) -> float:
    """Return how far a measured problem is from one on a GPU: at 1 they have 1/e in common."""
    apart = [(one - other) ** 2 for one, other in zip(place_of(work), evidence.place, strict=True)]
    return math.sqrt(sum(apart) + (_OTHER_GPU**2 if gpu != evidence.gpu else 0.0))


class Corrections:
    """What measured problems say of the predictions for others.

    Args:
        gpu: the device's name.
        baseline: the variant that others are compared with.
        evidence: of one family, size of elements, and kind of rows, narrow or not.
    """

    def __init__(self, gpu: str, baseline: str, evidence: Sequence[Evidence]) -> None:
        self._gpu, self._baseline, self._evidence = gpu, baseline, evidence
        self._fits: dict[str, _Fit | None] = {}

    def estimate(self, machine: Machine, works: Sequence[Work], names: Collection[str]) -> list[dict[str, Estimate]]:
        """Return for each of several problems the estimates of those variants that the model knows.

        Args:
            machine: whose constants the model takes.
            works: the problems.
            names: variants; the baseline is estimated in any case.
        """
        known = list(dict.fromkeys([self._baseline, *names]))
        places = np.array([place_of(work) for work in works])
        corrected = {name: self._correct(name, places) for name in known}
        found = []
        for index, work in enumerate(works):
            us = {name: predict_us(machine, name, work) for name in known}
            base = us[self._baseline]
            if base is None:
                raise ValueError(f"the model does not know {work.family}/{self._baseline}")
            off, _ = corrected[self._baseline]
            base_us = base * math.exp(off[index])
            estimates = {self._baseline: Estimate(base_us, 0.0, 0.0)}
            for name, predicted in us.items():
                if predicted is not None and name != self._baseline:
                    off, doubt = corrected[name]
                    ratio = math.log(predicted / base) + float(off[index])
                    estimates[name] = Estimate(base_us * math.exp(ratio), ratio, float(doubt[index]))
            found.append(estimates)
        return found

    def _correct(self, name: str, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what to add to a variant's logarithm at some places, and the doubt that is left."""
        if name not in self._fits:
            self._fits[name] = self._fit(name)
        fit = self._fits[name]
        if fit is None:
            spread = SPREAD if self._evidence else BLIND
            return np.zeros(len(places)), np.full(len(places), spread)
        return fit.at(places)

    def _fit(self, name: str) -> _Fit | None:
        base = self._baseline
        there = [one for one in self._evidence if name in one.off and base in one.off]
        if not there:
            return None
        off = [one.off[name] - (one.off[base] if name != base else 0.0) for one in there]
        others = np.array([one.gpu != self._gpu for one in there])
        return _Fit(np.array([one.place for one in there]), others, np.array(off))


class _Fit:
    """A Gaussian process: `off` was found at `places`, some of them on `others` of the GPUs of a chip."""

    def __init__(self, places: np.ndarray, others: np.ndarray, off: np.ndarray) -> None:
        self._places, self._others = places, others
        common = _common(places, places, others[:, None] != others[None, :])
        self._inverse = np.linalg.inv(common + NOISE**2 * np.eye(len(off)))
        self._weights = self._inverse @ off

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        common = _common(places, self._places, np.broadcast_to(self._others, (len(places), len(self._others))))
        left = SPREAD**2 - ((common @ self._inverse) * common).sum(axis=1)
        return common @ self._weights, np.sqrt(np.maximum(left, 0.0) + NOISE**2)


def _common(some: np.ndarray, others: np.ndarray, on_other_gpus: np.ndarray) -> np.ndarray:
    """Return the covariance of problems at places."""
    apart = ((some[:, None, :] - others[None, :, :]) ** 2).sum(axis=2) + np.where(on_other_gpus, _OTHER_GPU**2, 0.0)
    return SPREAD**2 * np.exp(-np.sqrt(apart))


def like(evidence: Iterable[Evidence], work: Work) -> list[Evidence]:
    """Return the measured problems that say something of one: of its family, size of elements, and kind of rows."""
    return [
        one
        for one in evidence
        if (one.work.family, one.work.element_bytes) == (work.family, work.element_bytes)
        and is_narrow(one.work) == is_narrow(work)
    ]
