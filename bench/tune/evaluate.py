"""How good `auto` is at problems that no table of measured times has: it chooses, and measured times judge.

Each measured problem is hidden from what `auto` knows, alone or with others, and it chooses among the variants that
were measured there, as on a machine that has them all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from iris_kernels.common.choice.auto import NAME as AUTO
from iris_kernels.common.choice.auto import baseline_of
from iris_kernels.common.choice.corrections import Evidence, evidence_of
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import Key, Measured, Table
from iris_kernels.common.choice.ranking import Ranking, work_of
from overlap_taxonomy import Machine, get_variant, machine_for

from ..measure.families import FAMILIES
from ..records.record import SCALES

# Whether a measured problem is hidden with one that is asked for on a GPU.
HIDDEN: Mapping[str, Callable[[Evidence, str, Key], bool]] = {
    "the problem": lambda one, gpu, key: (one.gpu, one.key) == (gpu, key),
    "its N and K": lambda one, gpu, key: (one.key.n, one.key.k) == (key.n, key.k),
    "its GPUs": lambda one, gpu, key: (one.gpu, one.key.world_size) == (gpu, key.world_size),
    "everything": lambda one, gpu, key: True,
}
MEASURED = "nothing"


@dataclass(frozen=True)
class Judged:
    """A problem for which something was chosen.

    Args:
        gpu, key: where, and what.
        hidden: of `HIDDEN`, what was not known; `MEASURED` where `auto` itself was measured.
        chosen: the variant that was chosen.
        over_best, over_library: its time over that of the fastest, and of the library.
        errors: of predicted times, relative to measured ones; logarithms, by variant.
    """

    gpu: str
    key: Key
    hidden: str
    chosen: str
    over_best: float
    over_library: float
    errors: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """What came out for several problems.

    Args:
        problems: how many.
        over_best: the chosen variant's time over that of the fastest: geometric mean, 90th percentile, most.
        good: the share of problems where that is at most 1.03.
        over_library: the same over the library's: geometric mean and most.
        slower: problems where that is over 1.02.
        error: of predicted times: median, and 90th percentile; None where nothing was predicted.
    """

    problems: int
    over_best: tuple[float, float, float]
    good: float
    over_library: tuple[float, float]
    slower: int
    error: tuple[float, float] | None


def judge(
    asked: Mapping[str, Table], known: Mapping[str, Table], hidden: str, calibrated: Machine | None = None
) -> Iterator[Judged]:
    """Yield what is chosen for each problem; those of fp32, and without the library's time, are left out.

    Args:
        asked: the problems, by GPU, with their times.
        known: the measured times, from which what is hidden is left out.
        hidden: of `HIDDEN`.
        calibrated: constants of a machine in place of those that come with the library.
    """

    def machine_of(gpu: str, world_size: int) -> Machine | None:
        is_it = calibrated and calibrated.has(gpu) and calibrated.world_size == world_size
        return calibrated if is_it else machine_for(gpu, world_size)

    evidence, hides = evidence_of(known, machine_of), HIDDEN[hidden]
    for gpu, table in asked.items():
        # By the machine and what is known of it: what is fitted to that is fitted once.
        asked_with: dict[tuple[int, tuple[bool, ...]], list[Key]] = {}
        for key in table:
            if key.dtype != "float32":
                known_here = tuple(not hides(one, gpu, key) for one in evidence)
                asked_with.setdefault((key.world_size, known_here), []).append(key)
        for (world_size, is_known), keys in asked_with.items():
            left = list(itertools.compress(evidence, is_known))
            here = Knowledge.of_evidence(gpu, left, machine_of(gpu, world_size))
            for key in keys:
                yield from _judge(gpu, key, table[key], here, hidden)


def _judge(gpu: str, key: Key, measured: Measured, known: Knowledge, hidden: str) -> Iterator[Judged]:
    baseline, times, machine = baseline_of(key.family), measured.times_us, known.machine(key.world_size)
    ours = [name for name in times if get_variant(key.family, name).has_kernels]
    if machine is None or baseline not in times or not ours:
        return
    dtype, *scales = key.dtype.split("-")
    how: dict[str, Any] = {"scales": SCALES[scales[0]], "use_fast_accum": "fast" in scales} if scales else {}
    sizes: dict[str, Any] = {"m": key.m, "n": key.n, "k": key.k, "world_size": key.world_size}
    problem = FAMILIES[key.family].problem(**sizes, dtype=getattr(torch, dtype), **how)
    candidates, work = [baseline, *ours], work_of(key.family, problem)
    chosen = Ranking(known, key.family, problem, candidates, is_here=False).of(key.m).variant
    estimates = known.corrections(work, baseline).estimate(machine, [work], candidates).of(0)
    errors = {name: math.log(one.us / times[name]) for name, one in estimates.items()}
    over_best = times[chosen] / min(times[name] for name in candidates)
    yield Judged(gpu, key, hidden, chosen, over_best, times[chosen] / times[baseline], errors)


def judge_measured(asked: Mapping[str, Table]) -> Iterator[Judged]:
    """Yield how `auto` did where it was measured itself, beside the variants that it chose from."""
    for gpu, table in asked.items():
        for key, measured in table.items():
            times, baseline = measured.times_us, baseline_of(key.family)
            others = [us for name, us in times.items() if name == baseline or get_variant(key.family, name).has_kernels]
            if AUTO in times and baseline in times:
                over_library = times[AUTO] / times[baseline]
                yield Judged(gpu, key, MEASURED, AUTO, times[AUTO] / min(others), over_library, {})


def verdict(judged: list[Judged]) -> Verdict:
    """Return what came out for these problems, at least one."""
    over_best = np.array([one.over_best for one in judged])
    over_library = np.array([one.over_library for one in judged])
    errors = np.abs([error for one in judged for error in one.errors.values()])
    return Verdict(
        len(judged),
        (_geomean(over_best), float(np.quantile(over_best, 0.9)), float(over_best.max())),
        float((over_best <= 1.03).mean()),
        (_geomean(over_library), float(over_library.max())),
        int((over_library > 1.02).sum()),
        (float(np.median(errors)), float(np.quantile(errors, 0.9))) if errors.size else None,
    )


def _geomean(ratios: np.ndarray) -> float:
    return float(np.exp(np.log(ratios).mean()))
