"""Why `auto` takes what it takes for a problem: predicted times and their parts, and what measured problems say."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from iris_kernels.common.calibration.kept import kept_machine
from iris_kernels.common.choice.auto import baseline_of
from iris_kernels.common.choice.corrections import Evidence, distance, like
from iris_kernels.common.choice.knowledge import Knowledge
from iris_kernels.common.choice.measured import key_of, shipped_tables
from iris_kernels.common.choice.ranking import CAUTION, Ranking, work_of
from iris_kernels.common.choice.tuning_cache import read_cache
from overlap_taxonomy import (
    MACHINES,
    Choice,
    Machine,
    Parts,
    Work,
    explain_us,
    get_variant,
    list_variants,
    machine_for,
    predict_ideal_us,
)

from ..measure.families import FAMILIES
from ..measure.job import scaling
from ..measure.shapes import Shape

_NEAREST = 5


@dataclass(frozen=True)
class Candidate:
    """What is known of a variant's time for the problem.

    Args:
        variant: its full name.
        parts: of the time that the model predicts.
        us: the time, corrected by measured problems, in µs.
        over_library: that over the library's.
        doubt: the standard deviation of the logarithm of that.
        needed: what it must be below, for `auto` to take it rather than the library, by prediction; None where the
            problem was measured, and measured times alone decide, and of a variant that is no contender: it was
            measured in many problems, and others were always as fast.
        measured_us: the problem's own time, where it was measured.
    """

    variant: str
    parts: Parts
    us: float
    over_library: float
    doubt: float
    needed: float | None
    measured_us: float | None


@dataclass(frozen=True)
class Near:
    """A measured problem near this one: how far, and what was fastest, in which part of the library's time."""

    evidence: Evidence
    distance: float
    fastest: str
    over_library: float


@dataclass(frozen=True)
class Explanation:
    """Why `auto` takes what it takes.

    Args:
        machine, family, shape: where, and what.
        row: the number of rows of `auto`'s table that stands for the shape's, of which times are predicted.
        choice: what it takes.
        ideal_us: a perfect overlap: the library's GEMM alone, or the bytes on the link.
        candidates: the library first, then the fastest first.
        nearest: measured problems, the nearest first.
    """

    machine: Machine
    gpu: str
    family: str
    shape: Shape
    row: int
    choice: Choice
    ideal_us: float
    candidates: list[Candidate]
    nearest: list[Near]


def gpu_name(text: str) -> str:
    """Return the driver's name of a GPU that the model knows, from a part of it, such as "H100".

    Raises:
        ValueError: no such GPU, or several; names those that there are.
    """
    names = dict.fromkeys(machine.gpu for machine in MACHINES.values())
    exact = machine_for(text, 1)
    found = [exact.gpu] if exact else [name for name in names if text and text.lower() in name.lower()]
    if len(found) != 1:
        raise ValueError(f"{'several GPUs are' if found else 'unknown GPU'} {text!r}; known GPUs: {', '.join(names)}")
    vendor = "NVIDIA" if next(one for one in MACHINES.values() if one.gpu == found[0]).is_hopper else "AMD Instinct"
    return text if text.startswith(vendor) else f"{vendor} {found[0]}"


class Product:
    """A product on a machine that need not be here, with any number of rows: what `auto` knows of it, and takes.

    Args:
        known: of the machine.
        family, shape, dtype: the product; its m is the most rows that are asked for.
        world_size: ranks.
        scales: of fp8 operands, as `Record.scales` has them; "" for those of rows, and for other dtypes.
    """

    def __init__(
        self, known: Knowledge, world_size: int, family: str, shape: Shape, dtype: torch.dtype, scales: str = ""
    ) -> None:
        machine = known.machine(world_size)
        assert machine is not None
        self.machine, self.baseline = machine, baseline_of(family)
        self._known, self._family = known, family
        self._problem = FAMILIES[family].problem(
            m=shape.m, n=shape.n, k=shape.k, world_size=world_size, dtype=dtype, **scaling(scales)
        )
        ours = [one.name for one in list_variants(family) if one.has_kernels]
        self._ranking = Ranking(known, family, self._problem, [self.baseline, *ours], is_here=False)

    def work(self, m: int) -> Work:
        """Return the problem of m rows as the model sees it."""
        return work_of(self._family, self._problem.with_rows(m))

    def row_of(self, m: int) -> int:
        """Return the number of rows of `auto`'s table that stands for m."""
        return self._ranking.row_of(m)

    def choice(self, m: int) -> Choice:
        """Return what `auto` takes for m rows."""
        return self._ranking.of(m)

    def ideal_us(self, m: int) -> float:
        """Return a perfect overlap's predicted time: the library's GEMM alone, or the bytes on the link."""
        return predict_ideal_us(self.machine, self.work(m), self._problem.with_rows(m).wire_bytes)

    def candidates(self, m: int) -> list[Candidate]:
        """Return what is known of each variant's time with m rows, the library first."""
        key = key_of(self._family, self._problem.with_rows(m))
        measured = next((dict(table[key].times_us) for table in self._known.tables.values() if key in table), {})
        by_times = is_measured(self.choice(m))
        work, found = self.work(self.row_of(m)), []
        for name, one in self._ranking.estimates(m).items():
            parts = explain_us(self.machine, name, work)
            assert parts is not None
            is_predicted, ratio = not by_times and name in self._ranking.contenders, math.exp(one.log_ratio)
            needed = math.exp(-CAUTION * one.doubt) if is_predicted else None
            found.append(Candidate(name, parts, one.us, ratio, one.doubt, needed, measured.get(name)))
        return found


def is_measured(choice: Choice) -> bool:
    """Return whether `auto` chose by measured times of the very problem, here or elsewhere."""
    return choice.why.startswith("measured")


@functools.cache
def shipped(gpu: str) -> Knowledge:
    """Return what comes with the library of a GPU: no times of a user's own, and no calibration."""
    return Knowledge(gpu, {}, shipped_tables(gpu))


def explain(
    gpu: str,
    world_size: int,
    family: str,
    shape: Shape,
    dtype: torch.dtype,
    known: Knowledge | None = None,
    *,
    scales: str = "",
) -> Explanation:
    """Return why `auto` takes what it takes on so many GPUs; nothing is run.

    Args:
        gpu: as its driver names it, one that the model knows.
        world_size, family, shape, dtype, scales: the problem, as `Product` has it.
        known: of the GPU; None for all that this user has of it.
    """
    known = known or Knowledge(gpu, read_cache(gpu), shipped_tables(gpu), kept_machine(gpu, world_size))
    product = Product(known, world_size, family, shape, dtype, scales)
    found, row = product.candidates(shape.m), product.row_of(shape.m)
    found[1:] = sorted(found[1:], key=lambda one: one.over_library * math.exp(CAUTION * one.doubt))
    nearest = _nearest(known, gpu, product.work(row), product.baseline)
    choice, ideal_us = product.choice(shape.m), product.ideal_us(shape.m)
    return Explanation(product.machine, gpu, family, shape, row, choice, ideal_us, found, nearest)


def _nearest(known: Knowledge, gpu: str, work: Work, baseline: str) -> list[Near]:
    there = [one for one in like(known.evidence(), work) if baseline in one.measured.times_us]
    found = []
    for one in sorted(there, key=lambda one: distance(gpu, work, one))[:_NEAREST]:
        family, times = one.key.family, one.measured.times_us
        compared = [name for name in times if name == baseline or get_variant(family, name).has_kernels]
        fastest = min(compared, key=lambda name: times[name])
        found.append(Near(one, distance(gpu, work, one), fastest, times[fastest] / times[baseline]))
    return found
