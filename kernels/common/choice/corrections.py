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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlap_taxonomy import Machine, Work, machine_for, predict_us

from .measured import Key, Measured, Table, work_of

# Each variant that is made takes memory and kernels of its own: one whose gain over others that are made anyway is
# nowhere larger than this is not. Predictions are off by more; but 0.04 took what is 1.16 times as slow in one of 136
# held-out problems, and of two H100s 91 % are then within 3 %, where 93 % are. With 0.035 a product of two H100s takes
# 2.2 times the heap of its most rows alone, for 3.6 % at one number of rows.
CLOSE = 0.037
NOISE = 0.02  # of a measured time's logarithm, from run to run
SPREAD = 0.12  # of the logarithm of measured over predicted, where nothing is near
_OFTEN = 50  # problems in which a variant was measured: what was not the fastest there is taken to be so nowhere
# Doublings of a size after which problems have 1/e in common. Of 0.5 to 8, shipped times whose N and K are hidden are
# chosen best for by these, or as well: on four GPUs 1.13 times the fastest at most, where 8 took 1.99.
_ROWS, _WEIGHT, _RANKS = 4.0, 4.0, 1.5
_AXES = 4  # of a place
# Another GPU of the same chip is as far as that part of these distances. With 0.15 an H200's memory, which has half
# again an H100's rate, said too much of H100s: 89 % of 82 held-out problems of two were within 3 %, now 93 %.
_OTHER_GPU = 0.3


@dataclass(frozen=True)
class Evidence:
    """A measured problem, and by how much the model is off there.

    Args:
        gpu, key: where, and what.
        work, machine: the same to the model.
        measured: the times, by variant.
    """

    gpu: str
    key: Key
    work: Work
    machine: Machine
    measured: Measured

    @functools.cached_property
    def off(self) -> dict[str, float]:
        """The logarithm of measured over predicted time, by variant; with default configurations alone."""
        times = {name: us for name, us in self.measured.times_us.items() if name not in self.measured.configs}
        predicted = {name: predict_us(self.machine, name, self.work) for name in times}
        return {name: math.log(times[name] / us) for name, us in predicted.items() if us}

    @functools.cached_property
    def place(self) -> tuple[float, ...]:
        """Where the problem is among others."""
        return place_of(self.work)


class Estimate(NamedTuple):
    """What is known of a variant's time.

    Args:
        us: the time, in µs.
        log_ratio: the logarithm of the time over the baseline's.
        doubt: the standard deviation of that.
    """

    us: float
    log_ratio: float
    doubt: float


def evidence_of(
    tables: Mapping[str, Table], machine_of: Callable[[str, int], Machine | None] = machine_for
) -> list[Evidence]:
    """Return the measured problems of several kinds of GPUs that the model knows.

    Args:
        tables: by the GPU's name.
        machine_of: returns the constants of so many GPUs of a name.
    """
    found = []
    for gpu, table in tables.items():
        for key, measured in table.items():
            if machine := machine_of(gpu, key.world_size):
                found.append(Evidence(gpu, key, work_of(key), machine, measured))
    return found


def place_of(work: Work) -> tuple[float, ...]:
    """Return where a problem is among others, along axes on which these have 1/e in common at a distance of 1."""
    m, n, k = (math.log2(size) for size in work.product)
    return m / _ROWS, n / _WEIGHT, k / _WEIGHT, math.log2(work.world_size) / _RANKS


def is_narrow(work: Work) -> bool:
    """Whether rows of A or of the output are not on 16 bytes: the model is off otherwise than where they are."""
    return work.reads_narrow_rows or work.has_narrow_output


def distance(gpu: str, work: Work, evidence: Evidence) -> float:
    """Return how far a measured problem is from one on a GPU: at 1 they have 1/e in common."""
    apart = [(one - other) ** 2 for one, other in zip(place_of(work), evidence.place, strict=True)]
    return math.sqrt(sum(apart) + (_OTHER_GPU**2 if gpu != evidence.gpu else 0.0))


@dataclass(frozen=True)
class Estimates:
    """The estimates of several variants for several problems.

    Args:
        names: of the variants, the baseline first.
        us, log_ratios, doubts: as `Estimate` has them, (variants, problems).
    """

    names: Sequence[str]
    us: np.ndarray
    log_ratios: np.ndarray
    doubts: np.ndarray

    def of(self, index: int) -> dict[str, Estimate]:
        """Return the estimates for one of the problems, by variant."""
        columns = (values[:, index].tolist() for values in (self.us, self.log_ratios, self.doubts))
        return {name: Estimate(*values) for name, *values in zip(self.names, *columns, strict=True)}


class Corrections:
    """What measured problems say of the predictions for others.

    Args:
        gpu: the device's name.
        baseline: the variant that others are compared with.
        evidence: of one family, size of elements, way of adding, and kind of rows, narrow or not.
    """

    def __init__(self, gpu: str, baseline: str, evidence: Sequence[Evidence]) -> None:
        self._baseline, self._evidence = baseline, evidence
        self._beside = [one for one in evidence if baseline in one.off]
        places = np.array([one.place for one in self._beside]).reshape(len(self._beside), _AXES)
        self._places, self._are_on_others = places, np.array([one.gpu != gpu for one in self._beside], dtype=bool)
        covariance = _common(places, places, self._are_on_others[:, None] != self._are_on_others[None, :])
        self._inverse = _inverse(covariance + NOISE**2 * np.eye(len(places)))
        self._fits: dict[str, _Fit] = {}
        self._contenders: dict[tuple[int, tuple[str, ...]], list[str]] = {}

    def contenders(self, world_size: int, names: Sequence[str]) -> list[str]:
        """Return those of these variants that may be the fastest over so many ranks.

        Left out is what was measured often, where others were always as fast or nearly so: `CLOSE`.

        Args:
            world_size: ranks.
            names: of variants, the baseline first, which stays.
        """
        asked = world_size, tuple(names)
        if asked not in self._contenders:
            measured = [one.measured.times_us for one in self._evidence if one.work.world_size == world_size]
            us = np.array([[times.get(name, np.inf) for times in measured] for name in names])
            kept, enough = list(range(len(names))), np.isfinite(us).sum(axis=1) >= _OFTEN
            if measured:
                fastest = us.min(axis=0)
                for one in sorted(kept[1:], key=lambda one: (us[one] == fastest).sum()):
                    others = [other for other in kept if other != one]
                    if enough[one] and (us[others].min(axis=0) <= fastest * (1.0 + CLOSE)).all():
                        kept = others
            self._contenders[asked] = [names[one] for one in kept]
        return self._contenders[asked]

    def estimate(self, machine: Machine, works: Sequence[Work], names: Collection[str]) -> Estimates:
        """Return the estimates of those variants that the model knows, for several problems.

        Args:
            machine: whose constants the model takes.
            works: the problems.
            names: variants; the baseline is estimated in any case.

        Raises:
            ValueError: the model does not know the baseline.
        """
        asked = dict.fromkeys([self._baseline, *names])
        predicted = {name: [predict_us(machine, name, work) for work in works] for name in asked}
        known = [name for name in asked if None not in predicted[name]]
        if self._baseline not in known:
            raise ValueError(f"the model does not know {works[0].family}/{self._baseline}")
        common = _common(np.array([place_of(work) for work in works]), self._places, self._are_on_others)
        solved = common @ self._inverse
        explained = (solved * common).sum(axis=1)
        fits = [self._fit(name) for name in known]
        log_us = np.log(np.array([predicted[name] for name in known]))
        off = np.array([common @ fit.weights for fit in fits])
        log_ratios, doubts = log_us - log_us[0] + off, np.array([fit.doubt(solved, explained) for fit in fits])
        log_ratios[0] = doubts[0] = 0.0
        return Estimates(known, np.exp(log_us[0] + off[0] + log_ratios), log_ratios, doubts)

    def _fit(self, name: str) -> _Fit:
        """Return what a variant's times say, or their ratios to the baseline's."""
        if name not in self._fits:
            base, off = self._baseline, [one.off for one in self._beside]
            found = np.array([one[name] - (one[base] if name != base else 0.0) if name in one else 0.0 for one in off])
            missing = np.array([index for index, one in enumerate(off) if name not in one], dtype=int)
            weights, block_inverse = self._inverse @ found, _inverse(self._inverse[np.ix_(missing, missing)])
            weights -= self._inverse[:, missing] @ (block_inverse @ weights[missing])
            self._fits[name] = _Fit(weights, missing, block_inverse)
        return self._fits[name]


class _Fit(NamedTuple):
    """A Gaussian process over those of the baseline's places at which a variant was measured, too.

    The covariance of all places is inverted once, for all variants. What some of them leave out is taken off by the
    inverse of the block that the places they miss have in that inverse.

    Args:
        weights: of the places: what is expected at another is their covariance with it, times these.
        missing: which places are left out.
        block_inverse: of these, the inverse of their block.
    """

    weights: np.ndarray
    missing: np.ndarray
    block_inverse: np.ndarray

    def doubt(self, solved: np.ndarray, explained: np.ndarray) -> np.ndarray:
        """Return the standard deviation of what is not known at some places.

        Args:
            solved: their covariance with all of the baseline's, times the inverse of these places' own.
            explained: by how much these, if none were missing, lower the variance.
        """
        if len(self.missing) == len(self.weights):  # it was measured nowhere
            return np.full(len(solved), SPREAD)
        lost = solved[:, self.missing]
        left = SPREAD**2 - explained + (lost @ self.block_inverse * lost).sum(axis=1)
        doubt: np.ndarray = np.sqrt(np.maximum(left, 0.0) + NOISE**2)
        return doubt


def _inverse(matrix: np.ndarray) -> np.ndarray:
    """Return the inverse of a symmetric, positive definite matrix.

    By Cholesky's factor it takes a third of numpy's time, which does not use the symmetry.
    """
    with _disable_current_modes():  # a backend of the compiler that fuses collectives asks among fake tensors
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(torch.from_numpy(matrix)))
        return inverse.contiguous().numpy()  # by rows: products with what lies by columns take numpy a fifth longer


def _common(some: np.ndarray, others: np.ndarray, on_other_gpus: np.ndarray) -> np.ndarray:
    """Return the covariance of problems at places; `on_other_gpus` is where, of two, one is on another GPU."""
    squares = (some**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)
    apart = np.maximum(squares - 2.0 * some @ others.T, 0.0) + _OTHER_GPU**2 * on_other_gpus
    return SPREAD**2 * np.exp(-np.sqrt(apart))


def like(evidence: Iterable[Evidence], work: Work) -> list[Evidence]:
    """Return the measured problems that say something of one: of its family, elements, sums, and kind of rows."""
    return [
        one
        for one in evidence
        if (one.work.family, one.work.element_bytes, one.work.sums) == (work.family, work.element_bytes, work.sums)
        and is_narrow(one.work) == is_narrow(work)
    ]
