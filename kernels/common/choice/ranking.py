"""The ranking of the variants of a product, by its number of rows: how much slower than the library each may be."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from overlap_taxonomy import Choice, Work, find_variant, predict_us

from ..config import GemmConfig
from ..problem import Problem
from .choices import Choices
from .corrections import CLOSE, NOISE, SPREAD, Estimate, like
from .knowledge import SHIPPED, Knowledge
from .measured import key_of
from .measured import work_of as measured_work_of

CAUTION = 0.5  # a variant must be predicted to be faster than the library by so many times the doubt
# So many times where others were measured and it was not, as it is younger than the times that come with the library.
# With the fastest hidden in 80 problems each of two and of four H200s, what is taken then takes 0.93 and 0.87 of the
# time of the fastest of the rest (the hidden one itself 0.92 and 0.86), and 1.03 at most; with CAUTION 1.09 at most.
UNMEASURED_CAUTION = 1.5
_LEAST_ROWS = 16384  # of a table
_MOST_ROWS = 1 << 62  # where there is no table


def rows_of_table(most: int) -> list[int]:
    """Return the numbers of rows of a table, `most` or a little more the last.

    There are few up to 64, where all takes as long as the weights do; then, as the library has tiles of any rows, one
    every 32, from 256 on every 64, and from 1024 on two for a doubling. With two thirds of those between 256 and 1024,
    NCCL + cuBLAS was faster by over 2 % in two of 270 held-out problems, and so it is in none.
    """
    rows = [1, 16, 32, 64]
    while (last := rows[-1]) < most:
        half = 1 << (last.bit_length() - 2)
        rows.append(last + (32 if last < 256 else 64 if last < 1024 else half))
    return rows


def work_of(family: str, problem: Problem) -> Work:
    """Return a problem as the model sees it."""
    share = problem.c_shape(0)[0] / problem.m if problem.norm else 0.0
    measured = measured_work_of(key_of(family, problem))
    return replace(measured, out_bytes=problem.dtype_of_partials.itemsize, normed_share=share)


def slower(log_ratio: Any, doubt: Any, caution: float = CAUTION) -> Any:
    """Return the logarithm of how much slower than the baseline a variant may be: the choice is the least of these.

    It is rounded: of two that the model thinks alike the first is taken, and not what the last bits say.

    Args:
        log_ratio, doubt: of an estimate, or of several as arrays.
        caution: how many times the doubt counts.
    """
    return np.round(log_ratio + caution * doubt, 6)


def slower_as_measured(times_us: Mapping[str, float], baseline: str) -> dict[str, float]:
    """Return `slower` of measured times, which differ from run to run, by variant."""
    log_ratios = np.array([math.log(us / times_us[baseline]) for us in times_us.values()])
    doubts = np.array([0.0 if name == baseline else NOISE for name in times_us])
    return dict(zip(times_us, slower(log_ratios, doubts).tolist(), strict=True))


def _without_close_ones(may_be: Any, taken: Any) -> Any:
    """Return what to take by rows, without variants whose place others that are taken can have; the baseline stays.

    Args:
        may_be: `slower` by variant and rows.
        taken: by rows, the variant of which that is least.
    """
    taken, by_rows = taken.copy(), taken.tolist()
    for one in sorted(set(by_rows) - {0}, key=by_rows.count):
        others = sorted(set(taken.tolist()) - {0, one})
        rows = np.flatnonzero(taken == one)
        if others:
            of_others = may_be[others][:, rows]
            if (of_others.min(axis=0) - may_be[one, rows] <= CLOSE).all():
                taken[rows] = np.array(others)[of_others.argmin(axis=0)]
    return taken


class Ranking:
    """The variants of a product by its number of rows, and how they compare.

    Args:
        known: of the machine.
        family, problem: the product; its m is one of those that will be asked for.
        candidates: variants that can do it, the library baseline first.
        num_sms: of the GPU, where some are reserved, whom all variants do without, the library too; None for all.
        is_here: whether a variant must be able to run in this process; False to choose for another machine.
        instead: what to take where nothing is known, of a product that the baseline cannot do: it is never chosen then.

    Attributes:
        contenders: the candidates whose predictions are compared; see `Corrections.contenders`.
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
        instead: str | None = None,
    ) -> None:
        self._known, self._family, self._problem = known, family, problem
        self._baseline, self._num_sms, self._is_here, self._instead = candidates[0], num_sms, is_here, instead
        self._candidates = [name for name in candidates if self._can(name, problem, None)]
        self._machine = known.machine(problem.world_size)
        self._free = self._machine.with_sms(num_sms) if self._machine and num_sms else self._machine
        self._work = work = work_of(family, problem)
        self._key = key_of(family, problem)
        self._measured = known.measured_rows(self._key)
        self._refusal, self._rows, self.contenders = "", [_MOST_ROWS], list[str]()
        if self._free is None:
            self._refusal = "neither measured nor modelled"
        elif work.element_bytes > 2 and not like(known.evidence(), work):
            self._refusal = "nothing like it was measured in fp32"
        else:
            self._rows = rows_of_table(max(_LEAST_ROWS, problem.m))
            works = [work.with_rows(m) for m in self._rows]
            self._corrections = known.corrections(work, self._baseline)
            self.contenders = self._candidates
            if not instead:
                self.contenders = self._corrections.contenders(problem.world_size, self._candidates)
            self._estimates = self._corrections.estimate(self._free, works, self.contenders)
            may_be = slower(self._estimates.log_ratios, self._estimates.doubts)
            if instead:
                may_be[0] = np.inf
            order = may_be.argsort(axis=0, kind="stable")
            self._taken: list[int] = _without_close_ones(may_be, order[0]).tolist()
            self._next: list[int] = order[min(1, len(order) - 1)].tolist()
            self._doubts: list[list[float]] = self._estimates.doubts.tolist()

    def choices(self) -> Choices:
        """Return what to make for each number of rows."""
        measured = {m: choice for m in self._measured if (choice := self._by_times(m))}
        return Choices(self._rows, [self._predicted(m) for m in self._rows], measured)

    def of(self, m: int) -> Choice:
        """Return what to make for m rows."""
        return self._by_times(m) or self._predicted(m)

    def row_of(self, m: int) -> int:
        """Return the number of rows of the table that stands for m rows."""
        return m if self._refusal else self._rows[self._place(m)]

    def estimates(self, m: int) -> dict[str, Estimate]:
        """Return what is known of all candidates' times with so many rows; nothing where the model knows nothing."""
        if self._free is None or self._refusal:
            return {}
        work = self._work.with_rows(self.row_of(m))
        return self._corrections.estimate(self._free, [work], self._candidates).of(0)

    def _place(self, m: int) -> int:
        return bisect.bisect_left(self._rows, m)

    def _by_times(self, m: int) -> Choice | None:
        """Return the fastest by the first table that has the problem; None if neither does, or it cannot be had."""
        if m not in self._measured:
            return None
        for why, table in self._known.tables.items():
            measured = table.get(self._key._replace(m=m))
            able = self._candidates[1:] if self._instead else self._candidates
            there = [name for name in able if measured and name in measured.times_us]
            if measured and there and (self._instead or there[0] == self._baseline):
                times = self._as_asked({name: measured.times_us[name] for name in there}, m)
                may_be = times
                if not self._instead:
                    may_be = slower_as_measured(times, self._baseline)
                    if why == SHIPPED:
                        may_be = self._slower_as_predicted(m) | may_be
                name = min(may_be, key=may_be.__getitem__)
                if name not in times:
                    return self._as_predicted(self._estimates.names.index(name), self._place(m))
                config = measured.configs.get(name)
                if config and self._num_sms:
                    config = replace(config, num_sms=min(config.num_sms, self._num_sms))
                if self._can(name, self._problem.with_rows(m), config):
                    return Choice(name, config, why)
        return None

    def _slower_as_predicted(self, m: int) -> dict[str, float]:
        """Return, by variant, how much slower than the baseline it may be, beside others that were measured."""
        if self._refusal:
            return {}
        estimates, place = self._estimates, self._place(m)
        may_be = slower(estimates.log_ratios[:, place], estimates.doubts[:, place], UNMEASURED_CAUTION)
        return dict(zip(estimates.names, may_be.tolist(), strict=True))

    def _predicted(self, m: int) -> Choice:
        if self._refusal:
            return Choice(self._instead or self._baseline, None, self._refusal)
        place = self._place(m)
        return self._as_predicted(self._taken[place], place)

    def _as_predicted(self, taken: int, place: int) -> Choice:
        """Return the choice of a variant, by its index, and whether problems like it say so."""
        # The library's own time is beyond doubt: how well it is known that nothing is faster is the next one's.
        ours = self._next[place] if taken == 0 else taken
        is_near = 0.0 < self._doubts[ours][place] < SPREAD / 2
        return Choice(self._estimates.names[taken], None, "predicted by problems like it" if is_near else "predicted")

    def _as_asked(self, times_us: dict[str, float], m: int) -> dict[str, float]:
        """Return times that were measured without a norm, by variant, as they are with it and on the SMs that are free.

        Those are of the same product, of m rows.
        """
        if self._machine is None or self._free is None:
            return times_us
        if self._free is self._machine and not self._work.normed_share:
            return times_us
        work = work_of(self._family, self._problem.with_rows(m))
        as_asked = {}
        for name, us in times_us.items():
            measured = predict_us(self._machine, name, replace(work, normed_share=0.0))
            asked = predict_us(self._free, name, work)
            as_asked[name] = us * asked / measured if measured and asked else us
        return as_asked

    def _can(self, name: str, problem: Problem, config: GemmConfig | None) -> bool:
        """Whether a variant can do it; without a configuration, that does not depend on the number of rows."""
        if name == self._baseline or not self._is_here:
            return True
        variant = find_variant(self._family, name)
        return variant is not None and not variant.unsupported_reason(problem, config)
