"""Times of a problem that was not measured: the model's, corrected by how far it is off on problems like it.

Where the model is off, it is off by as much on the next problem: 300 rows of a weight, of which 256 and 512 were
measured, are predicted as these two were, as much too fast or too slow. How alike two problems are falls with the
distance of their sizes, in powers of two. The constants are those that chose best for shipped problems that were hidden
from them, alone or with all others of their weight (docs/design.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from overlap_taxonomy import Machine, Work, predict_us

from ..config import DTYPES
from .measured import Measured, Table

_ELEMENT_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPES}

_ROWS_SCALE = 1.5  # powers of two
_WEIGHT_SCALE = 0.7  # the same of n and k
_DOUBT = 0.3  # what the model's own prediction counts for, where one just like it counts 1
_LEAST_WEIGHT = 0.02  # of one that is looked at
_ENOUGH = 0.5  # weight of all together


@dataclass(frozen=True)
class Estimate:
    """A variant's time in µs, and whether problems were measured that are like it."""

    us: float
    is_near: bool


def estimate(
    machine: Machine, work: Work, names: Collection[str], table: Table, *, measured_on: Machine | None = None
) -> dict[str, Estimate]:
    """Return the times of those of several variants that the model knows, with their default configurations.

    Args:
        machine: whose constants the model takes.
        work: the problem.
        names: variants.
        table: measured times, of this kind of machine; those of bf16 hold for fp16, too.
        measured_on: the machine that they are of; None for `machine`.
    """
    neighbours = []
    for key, measured in table.items():
        like = (key.family, key.world_size, _ELEMENT_BYTES.get(key.dtype))
        if like == (work.family, work.world_size, work.element_bytes):
            other = Work(key.family, key.m, key.n, key.k, key.world_size, work.element_bytes)
            weight = _likeness(work, other)
            if weight >= _LEAST_WEIGHT and is_narrow(other) == is_narrow(work):
                neighbours.append((weight, other, measured))
    predicted = {name: us for name in names if (us := predict_us(machine, name, work)) is not None}
    return {name: _corrected(measured_on or machine, name, us, neighbours) for name, us in predicted.items()}


def _corrected(machine: Machine, name: str, us: float, neighbours: list[tuple[float, Work, Measured]]) -> Estimate:
    total, off = 0.0, 0.0
    for weight, work, measured in neighbours:
        is_tuned = name in measured.configs  # that configuration is of that problem alone
        if name in measured.times_us and not is_tuned and (predicted := predict_us(machine, name, work)) is not None:
            total += weight
            off += weight * math.log(measured.times_us[name] / predicted)
    return Estimate(us * math.exp(off / (total + _DOUBT)), total >= _ENOUGH)


def _likeness(one: Work, other: Work) -> float:
    """Return 1 for the same sizes, less the further these are from each other."""
    m, n, k = (math.log2(size / another) for size, another in zip(_sizes(one), _sizes(other), strict=True))
    return math.exp(-((m / _ROWS_SCALE) ** 2) - (n**2 + k**2) / _WEIGHT_SCALE**2)


def _sizes(work: Work) -> tuple[int, int, int]:
    return work.m, work.n, work.k


def is_narrow(work: Work) -> bool:
    """Whether rows of A or of the output are not on 16 bytes: the model is off otherwise than where they are."""
    return work.reads_narrow_rows or work.is_narrow(work.n)
