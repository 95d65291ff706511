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
# held-out problems. Of 54 products this takes 2.7 variants in the mean, and 0.02 takes 2.8; with that, products of two
# H100s took up to 2.2 times the heap of their most rows alone, for 2.5 % at one number of rows.
CLOSE = 0.03
NOISE = 0.02  # of a measured time's logarithm, from run to run
SPREAD = 0.12  # of the logarithm of measured over predicted, where nothing is near
_OFTEN = 50  # problems in which a variant was measured: what was not the fastest there is taken to be so nowhere
# Doublings of a size after which problems have 1/e in common. Of 0.5 to 8, shipped times whose N and K are hidden are
# chosen best for by these, or as well: on four GPUs 1.13 times the fastest at most, where 8 took 1.99.
_ROWS, _WEIGHT, _RANKS = 4.0, 4.0, 1.5
_AXES = 4  # of a place
_OTHER_GPU = 0.15  # another GPU of the same chip is as far as that part of these distances


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
        self._places = np.array([one.place for one in evidence]).reshape(len(evidence), _AXES)
        self._are_on_others = np.array([one.gpu != gpu for one in evidence], dtype=bool)
        self._processes: dict[tuple[int, ...], _Process] = {}
        self._fits: dict[str, tuple[_Process, np.ndarray]] = {}
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
        log_us = np.log(np.array([predicted[name] for name in known]))
        base_log_us = log_us[0] + self._off(self._baseline, common)
        log_ratios, doubts = log_us - log_us[0], np.zeros_like(log_us)
        by_process: dict[_Process, np.ndarray] = {}  # variants measured at the same places are doubted alike
        for index, name in enumerate(known[1:], 1):
            log_ratios[index] += self._off(name, common)
            process, _ = self._fit(name)
            if process not in by_process:
                by_process[process] = process.doubt(common)
            doubts[index] = by_process[process]
        return Estimates(known, np.exp(base_log_us + log_ratios), log_ratios, doubts)

    def _off(self, name: str, common: np.ndarray) -> np.ndarray:
        """Return what to add to a variant's logarithm at some places."""
        process, weights = self._fit(name)
        off: np.ndarray = common[:, process.there] @ weights
        return off

    def _fit(self, name: str) -> tuple[_Process, np.ndarray]:
        """Return where a variant was measured beside the baseline, and what these places weigh."""
        if name not in self._fits:
            base = self._baseline
            there = tuple(index for index, one in enumerate(self._evidence) if name in one.off and base in one.off)
            if there not in self._processes:
                self._processes[there] = _Process(there, self._places, self._are_on_others)
            process = self._processes[there]
            found = [self._evidence[index].off for index in there]
            off = [one[name] - (one[base] if name != base else 0.0) for one in found]
            self._fits[name] = process, process.inverse @ np.array(off)
        return self._fits[name]


class _Process:
    """A Gaussian process: something was found `there`, at some of the places, which may be `on_others` of a chip."""

    def __init__(self, there: Sequence[int], places: np.ndarray, on_others: np.ndarray) -> None:
        self.there = np.array(there, dtype=int)
        places, on_others = places[self.there], on_others[self.there]
        common = _common(places, places, on_others[:, None] != on_others[None, :])
        covariance = common + NOISE**2 * np.eye(len(there))
        # Asked for every table. By Cholesky's factor it takes a third of numpy's time, which does not use the symmetry.
        # A backend of the compiler that fuses collectives asks, too, among fake tensors.
        with _disable_current_modes():
            self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(torch.from_numpy(covariance))).numpy()

    def doubt(self, common: np.ndarray) -> np.ndarray:
        """Return the standard deviation of what is not known at places with this covariance with all others."""
        if not self.there.size:
            return np.full(len(common), SPREAD)
        mine = common[:, self.there]
        left = SPREAD**2 - (mine @ self.inverse * mine).sum(axis=1)
        doubt: np.ndarray = np.sqrt(np.maximum(left, 0.0) + NOISE**2)
        return doubt


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
