"""What is known of a machine, and from it the variant and configuration for a product of any number of rows.

A table is made with the first call of a product: for some numbers of rows, how much slower than the library baseline
each variant may be. A call of a new number takes the next one's in the table, as tiles do, so it costs the host a few
microseconds, and no rank is asked.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from overlap_taxonomy import Choice, Machine, Work, get_variant, machine_for, predict_us

from ..config import GemmConfig
from ..problem import Problem
from .corrections import NOISE, SPREAD, Corrections, Estimate, Evidence, evidence_of, is_narrow, like
from .measured import Table, key_of

CAUTION = 0.5  # a variant must be predicted to be faster than the library by so many times the doubt
_LEAST_ROWS = 16384  # of a table
_MOST_ROWS = 1 << 62  # where there is no table


@dataclass(frozen=True)
class Machines:
    """A machine of the model, None where it has none, as times are measured on it, and with the SMs that are free.

    `num_sms` is how many these are; None for all.
    """

    whole: Machine | None
    free: Machine | None
    num_sms: int | None

    @classmethod
    def of(cls, gpu: str, world_size: int, num_sms: int | None) -> Machines:
        """Return the machine of so many GPUs, of which `num_sms` are free."""
        whole = machine_for(gpu, world_size)
        return cls(whole, whole.with_sms(num_sms) if whole and num_sms else whole, num_sms)

    def us(self, measured_us: float, variant: str, work: Work) -> float:
        """Return a measured time as it is on the SMs that are free."""
        if self.free is self.whole or self.whole is None or self.free is None:
            return measured_us
        whole, free = (predict_us(machine, variant, work) for machine in (self.whole, self.free))
        return measured_us * free / whole if whole and free else measured_us

    def fitting(self, config: GemmConfig | None) -> GemmConfig | None:
        """Return a measured configuration with no more programs than there are SMs free."""
        if config is None or self.num_sms is None:
            return config
        return replace(config, num_sms=min(config.num_sms, self.num_sms))


def rows_of_table(most: int) -> list[int]:
    """Return the numbers of rows of a table, `most` or a little more the last.

    There are few up to 128, where all is in one tile, and the fewer for a doubling the more tiles there are.
    """
    rows = [1, 16, 32, 64, 128]
    while (last := rows[-1]) < most:
        step = (1 << (last.bit_length() - 1)) // (4 if last < 512 else 2 if last < 4096 else 1)
        rows.append(last + step)
    return rows


@dataclass
class Knowledge:
    """What is known of a machine, the same on all ranks.

    Args:
        gpu: the GPU's name.
        measured: times that its user measured.
        shipped: those that come with the library, of GPUs of this chip, by their names.
    """

    gpu: str
    measured: Table
    shipped: Mapping[str, Table]
    _evidence: list[Evidence] | None = field(default=None, repr=False)
    _corrections: dict[tuple[str, str, int, bool], Corrections] = field(default_factory=dict, repr=False)

    @classmethod
    def of_evidence(cls, gpu: str, evidence: Sequence[Evidence]) -> Knowledge:
        """Return what these measured problems say of others, and nothing of themselves."""
        return cls(gpu, {}, {}, list(evidence))

    @property
    def tables(self) -> dict[str, Table]:
        """The times of this GPU, by the word for where they are from, the first that counts first."""
        return {"measured here": self.measured, "measured": self.shipped.get(self.gpu, {})}

    def evidence(self) -> list[Evidence]:
        """Return all problems that were measured on GPUs of this chip."""
        if self._evidence is None:
            here = {**self.shipped.get(self.gpu, {}), **self.measured}
            self._evidence = evidence_of({**self.shipped, self.gpu: here})
        return self._evidence

    def corrections(self, work: Work, baseline: str) -> Corrections:
        """Return what measured problems say of the predictions for one, beside a baseline."""
        key = (work.family, baseline, work.element_bytes, is_narrow(work))
        if key not in self._corrections:
            self._corrections[key] = Corrections(self.gpu, baseline, like(self.evidence(), work))
        return self._corrections[key]


def work_of(family: str, problem: Problem) -> Work:
    """Return a problem as the model sees it."""
    return Work(family, problem.m, problem.n, problem.k, problem.world_size, problem.dtype.itemsize)


def slower(estimate: Estimate) -> float:
    """Return the logarithm of how much slower than the baseline a variant may be: the choice is the least of these.

    It is rounded, as the last bits may be others on another rank, whose linear algebra has other threads.
    """
    return round(estimate.log_ratio + CAUTION * estimate.doubt, 6)


def measured_estimates(times_us: Mapping[str, float], baseline: str) -> dict[str, Estimate]:
    """Return estimates that are measured times; they differ from run to run."""
    base_us = times_us[baseline]
    return {
        name: Estimate(us, math.log(us / base_us), 0.0 if name == baseline else NOISE) for name, us in times_us.items()
    }


class Choices:
    """The variants of a product by its number of rows.

    Args:
        known: of the machine.
        family, problem: the product; its m is one of those that will be asked for.
        candidates: variants that can do it, the library baseline first.
        num_sms: of the GPU, where some are reserved, whom all variants do without, the library too; None for all.
        is_here: whether a variant must be able to run in this process; False to choose for another machine.
    """

    def __init__(
        self,
        known: Knowledge,
        family: str,
        problem: Problem,
        candidates: Sequence[str],
        num_sms: int | None = None,
        *,
        is_here: bool = True,
    ) -> None:
        self._is_here = is_here
        self._known, self._family, self._candidates = known, family, candidates
        self._machines = Machines.of(known.gpu, problem.world_size, num_sms)
        self._problem = problem
        self._unable: dict[str, bool] = {}
        self._rows: list[int] = []
        self._estimates: list[dict[str, Estimate]] = []
        machine, work = self._machines.free, work_of(family, problem)
        if machine is None:
            self._refusal = "neither measured nor modelled"
            return
        corrections = known.corrections(work, candidates[0])
        self._refusal = ""
        if work.element_bytes > 2 and not like(known.evidence(), work):
            self._refusal = "nothing like it was measured in fp32"
            return
        self._rows = rows_of_table(max(_LEAST_ROWS, problem.m))
        works = [replace(work, m=m) for m in self._rows]
        self._estimates = corrections.estimate(machine, works, candidates)

    @property
    def most(self) -> int:
        """The most rows that the table is for."""
        return self._rows[-1] if self._rows else _MOST_ROWS

    def of(self, problem: Problem) -> Choice:
        """Return what to make for this number of rows, `most` at most."""
        return self._measured(problem) or self._predicted(problem)

    def _measured(self, problem: Problem) -> Choice | None:
        """Return the fastest by the first table that has the problem; None if neither does, or it cannot be had."""
        key = None
        for why, table in self._known.tables.items():
            if not table:
                continue
            key = key or key_of(self._family, problem)
            measured = table.get(key)
            if measured and self._candidates[0] in measured.times_us:
                work = work_of(self._family, problem)
                times = {
                    name: self._machines.us(measured.times_us[name], name, work)
                    for name in self._candidates
                    if name in measured.times_us and not self._cannot(name, problem, None)
                }
                estimates = measured_estimates(times, self._candidates[0])
                name = min(estimates, key=lambda name: slower(estimates[name]))
                config = self._machines.fitting(measured.configs.get(name))
                if not self._cannot(name, problem, config):
                    return Choice(name, config, why)
        return None

    def _predicted(self, problem: Problem) -> Choice:
        if self._refusal:
            return Choice(self._candidates[0], None, self._refusal)
        able = [name for name in self.ranking(problem.m) if not self._cannot(name, problem, None)]
        # The library's own time is beyond doubt: how well it is known that nothing is faster is the next one's.
        ours = next((name for name in able if name != self._candidates[0]), able[0])
        is_near = 0.0 < self.estimates(problem.m)[ours].doubt < SPREAD / 2
        return Choice(able[0], None, "predicted by problems like it" if is_near else "predicted")

    def ranking(self, m: int) -> list[str]:
        """Return the candidates that the model knows, by how much slower than the baseline they may be with m rows."""
        estimates = self.estimates(m)
        return sorted(estimates, key=lambda name: slower(estimates[name]))

    def row_of(self, m: int) -> int:
        """Return the number of rows of the table that stands for m rows."""
        return self._rows[bisect.bisect_left(self._rows, m)] if self._rows else m

    def estimates(self, m: int) -> dict[str, Estimate]:
        """Return what is known of the candidates' times with so many rows; nothing where the model knows nothing."""
        return self._estimates[bisect.bisect_left(self._rows, m)] if self._rows else {}

    def _cannot(self, name: str, problem: Problem, config: GemmConfig | None) -> bool:
        """Whether a variant cannot do it; without a configuration, that does not depend on the number of rows."""
        if name == self._candidates[0] or not self._is_here:
            return False
        if config is None and name in self._unable:
            return self._unable[name]
        cannot = bool(get_variant(self._family, name).unsupported_reason(problem, config))
        if config is None:
            self._unable[name] = cannot
        return cannot
