"""One rank's part: call a product in every way, check what comes, and take the host's time for each kind of call.

All ranks make the same calls; the times are each rank's own, and the first rank's are kept. They end when a call
returns, which is when its work is queued: nothing waits for the device in between.
"""

from __future__ import annotations

import cProfile
import gc
import itertools
import math
import pstats
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from iris_core import Context
from overlap_taxonomy import get_variant

from ...command.exits import interrupts_held
from ...measure.correctness import Expectation
from ...measure.families import FAMILIES, Block
from ...measure.inputs import Draw
from ...measure.job import attempt, context
from ...measure.shapes import Shape
from .record import Outcome
from .ways import EAGER, FUNCTION, IN_GRAPH, LARGE, LAYER, MM, OPERATOR, OPS, SAME, SMALL, WAYS, Call, Product, kinds_of

_APART = 128  # elements between the beginnings of weights, whose addresses are as aligned as an allocator's
_CACHED_BYTES = 16 << 20  # more than the caches that a core has for itself
_SHOWN = 10  # functions of a profile

Row = tuple[str, str]  # a way, and a kind of call


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        family, shape: the product; ranks have equal parts of each size.
        variant: by name.
        rounds: bursts of repeated calls.
        burst: calls, or ops of graphs, of one. The device runs them behind the host, and the driver has room for some
            1024 launches that wait, more of which wait for the device: a burst is far shorter.
        singles: calls of each other kind, at most.
        profiled: calls of each way that are profiled.
        folder: where profiles go; "" for none.
        seed: of the inputs.
    """

    family: str
    shape: Shape
    variant: str
    rounds: int
    burst: int
    singles: int
    profiled: int
    folder: str
    seed: int


class Profile(NamedTuple):
    """Where the time of repeated calls goes: the functions with most own time, and that, µs per call or graph."""

    path: str
    functions: list[tuple[str, float]]


def measure(rank: int, world_size: int, plan: Plan) -> tuple[list[Outcome], list[Profile]]:
    """Return all measurements of a problem, of the same statuses on every rank, and rank 0's profiles; collective.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
        PeerError: a rank failed alone.
    """
    run = _Run(context(), plan)
    with torch.no_grad():
        outcomes = run.measured()
    run.close()
    return outcomes, run.profiles


class _Run:
    """One problem on one rank."""

    def __init__(self, ctx: Context, plan: Plan) -> None:
        self.ctx, self.plan, self.rank = ctx, plan, ctx.get_rank()
        family, shape, world_size = FAMILIES[plan.family], plan.shape, ctx.get_num_ranks()
        self.problem = family.problem(m=shape.m, n=shape.n, k=shape.k, world_size=world_size, dtype=torch.bfloat16)
        self.product = Product(ctx, plan.family, plan.variant, self.problem)
        draw = Draw(plan.seed, self.problem, 0, ctx.get_device())
        self.a, b = family.operands(self.problem, self.rank, draw)
        self.multiplied, self.weight = family.gemm_a(self.problem, self.a, draw), b.t()
        self.expected = self._expectation(family.blocks(self.problem, self.rank, draw), self.problem.c_shape(self.rank))
        self.calls: dict[str, Call] = {}  # those that are right
        self.samples: dict[Row, list[float]] = defaultdict(list)  # µs of a call
        self.counts: dict[Row, int] = {}
        self.failures: dict[Row, tuple[str, str]] = {}  # status and reason
        self.profiles: list[Profile] = []

    def measured(self) -> list[Outcome]:
        """Check every way, and time those that are right."""
        plan, rows = self.plan, None
        reason = get_variant(plan.family, plan.variant).unsupported_reason(self.problem, None) or ""
        status = "unsupported"
        if not reason:
            rows, reason = attempt(self.ctx, self._prepared_rows)
            status = "unsupported" if reason.startswith("ValueError") else "error"
        for number, way in enumerate(way for way in WAYS if way not in IN_GRAPH):
            if reason and way != MM:
                self._fail(way, kinds_of(way), status, reason)
            else:
                self._check(way, number)
        config = self.product.operators().of(plan.shape.m).describe_config() if OPERATOR in self.calls else ""
        self._time_repeated()
        for kind, way in itertools.product(SAME, self.calls):
            if kind in kinds_of(way):
                self._time(way, kind, [(self.calls[way], self._a_of(way), plan.shape.m)] * plan.singles)
        if rows:
            self._time_new_rows(rows)
            self._time_new_weights(rows)
        if plan.folder:
            for way in self.calls:
                self._profile(way)
        return [self._outcome(way, kind, "" if way == MM else config) for way in WAYS for kind in kinds_of(way)]

    def close(self) -> None:
        """Give back what the calls took; collective."""
        self.calls.clear()
        with interrupts_held():
            torch.compiler.reset()
            gc.collect()
        self.ctx.release_operators(captured=True)
        if not self.ctx.is_interpreted():
            torch.cuda.empty_cache()

    # Checks ----------------------------------------------------------------------------------------------------------

    def _check(self, way: str, number: int) -> None:
        """Have a way's call timed if what it gives is right; the operands are another multiple for each way.

        So what an earlier call left behind is wrong. Multiples are powers of two, and change no rounding.
        """
        call, error = attempt(self.ctx, self._call_of, way)
        found = None
        if call is not None:
            found, error = attempt(self.ctx, self._fault, way, call, (-2.0) ** (number % 8 + 1))
        reasons = [one for one in self.ctx.control_plane.all_gather(error or found) if one]
        if call is not None and not reasons:
            self.calls[way] = call
        else:
            status = "wrong" if found is not None else "unsupported" if error.startswith("ValueError") else "error"
            self._fail(way, kinds_of(way), status, reasons[0])

    def _call_of(self, way: str) -> Call:
        if way == MM:
            product = torch.mm(self.multiplied, self.weight.t())
            b = self.weight.t()
            return lambda a, m: torch.mm(a, b, out=product)
        return self.product.call(way, [self.weight, *(self.weight.clone() for _ in range(OPS.get(way, 1) - 1))])

    def _fault(self, way: str, call: Call, factor: float) -> str:
        """Return what is wrong with what a call gives, or ""; it is called with A times a power of two."""
        a = self._a_of(way)
        found = call(a * factor, self.plan.shape.m)
        outputs = [one.clone() for one in found] if way in OPS else [found.clone()]
        if len(outputs) != OPS.get(way, 1):
            return f"{len(outputs)} outputs of {OPS.get(way, 1)} calls"
        expected = self.expected
        if way == MM:
            whole = slice(None)
            block = Block(whole, whole, [(a, self.weight.t())])
            expected = self._expectation([block], (a.shape[0], self.weight.shape[0]))
        elif way in (OPERATOR, FUNCTION):
            outputs = [self.product.operators().of(self.plan.shape.m).as_matrix(one) for one in outputs]
        verdicts = [expected.judge(one / factor) for one in outputs]
        return next((one.reason for one in verdicts if not one.correct), "")

    def _expectation(self, blocks: Any, shape: tuple[int, int]) -> Expectation:
        return Expectation(blocks, shape=shape, dtype=self.problem.out_dtype)

    def _a_of(self, way: str) -> torch.Tensor:
        return self.multiplied if way == MM else self.a

    def _rows_of_a(self, m: int) -> torch.Tensor:
        return self.a[: self.problem.with_rows(m).a_shape(self.rank)[0]]

    def _fail(self, way: str, kinds: Sequence[str], status: str, reason: str) -> None:
        for kind in kinds:
            self.failures[way, kind] = status, " ".join(reason.split())

    # Times -----------------------------------------------------------------------------------------------------------

    def _time_repeated(self) -> None:
        """Time bursts of all ways, round by round: between bursts the device and the ranks are waited for."""
        m = self.plan.shape.m
        for _ in range(self.plan.rounds):
            for way, call in self.calls.items():
                a, times = self._a_of(way), self._times_of(way, self.plan.burst)
                call(a, m)  # behind other ways memory for outputs may lie elsewhere
                self.ctx.barrier()
                with _uncollected():
                    start = time.perf_counter()
                    for _ in range(times):
                        call(a, m)
                    elapsed = time.perf_counter() - start
                self.samples[way, "repeated"].append(elapsed * 1e6 / times)
        self.ctx.barrier()
        for way in self.calls:
            self.counts[way, "repeated"] = self.plan.rounds * self._times_of(way, self.plan.burst)
        for way, (small, large) in IN_GRAPH.items():
            graphs = (small, "repeated"), (large, "repeated")
            if failed := next((self.failures[one] for one in graphs if one in self.failures), None):
                self.failures[way, "repeated"] = failed
                continue
            pairs = zip(*(self.samples[one] for one in graphs), strict=True)
            self.samples[way, "repeated"] = [(of_large - of_small) / (LARGE - SMALL) for of_small, of_large in pairs]
            self.counts[way, "repeated"] = (LARGE - SMALL) * self.counts[graphs[1]]

    def _times_of(self, way: str, ops: int) -> int:
        """Return how often a way is called for so many calls of one product."""
        return max(1, ops // OPS.get(way, 1))

    def _time(self, way: str, kind: str, calls: Sequence[tuple[Call, torch.Tensor, int]]) -> None:
        """Time calls one by one, each behind what was queued before; collective."""
        filler = np.zeros(_CACHED_BYTES if kind == "cold" else 0, dtype=np.uint8)
        _, error = attempt(self.ctx, self._take_singles, self.samples[way, kind], calls, filler)
        self.counts[way, kind] = len(calls)
        if error:
            self._fail(way, [kind], "error", error)

    def _take_singles(
        self, samples: list[float], calls: Sequence[tuple[Call, torch.Tensor, int]], filler: np.ndarray
    ) -> None:
        with _uncollected():
            for call, a, m in calls:
                self.ctx.backend.synchronize()
                filler += 1
                start = time.perf_counter()
                call(a, m)
                samples.append((time.perf_counter() - start) * 1e6)
        self.ctx.backend.synchronize()

    def _prepared_rows(self) -> dict[str, list[int]]:
        """Return the numbers of rows of each eager way's new calls, and under "" those that warm; collective.

        All are multiples of the ranks, more than half of the whole problem's, and no way has another's. Their kernels
        are compiled here, by operators that are released again. `auto` may take several variants for them: those that
        warm have the most rows of each, so that no operator is made, or grows, later.
        """
        plan, m, world_size = self.plan, self.plan.shape.m, self.ctx.get_num_ranks()
        found = [rows for rows in range(world_size, m, world_size) if rows > m // 2]
        random.Random(plan.seed).shuffle(found)
        found = found[: plan.singles * (len(EAGER) + 1)]
        operators, b = self.product.own_operators(), self.weight.t()
        whole, largest = operators.of(m), dict[str, int]()
        for rows in sorted(found, reverse=True):
            operator = operators.of(rows)
            largest.setdefault(operator.variant, rows)
            for one in (operator,) if operator is whole else (operator, whole):
                one.call(self._rows_of_a(rows), b, m=rows)
        self.ctx.release_operators(captured=True)
        found = [*largest.values(), *(rows for rows in found if rows not in largest.values())]
        each = min(plan.singles, (len(found) - len(largest)) // len(EAGER))
        groups = {way: found[len(found) - (index + 1) * each :][:each] for index, way in enumerate(EAGER)}
        return {"": sorted(found[: len(found) - each * len(EAGER)], reverse=True), **groups}

    def _time_new_rows(self, rows_of: dict[str, list[int]]) -> None:
        """Time each eager way's calls of numbers of rows that it has not had."""
        for way in EAGER:
            if (call := self.calls.get(way)) is None:
                continue
            if not rows_of[way]:
                self._fail(way, ["new_m"], "unsupported", "there are too few numbers of rows above half of M")
                continue
            for rows in rows_of[""]:
                call(self._rows_of_a(rows), rows)
            self._time(way, "new_m", [(call, self._rows_of_a(rows), rows) for rows in rows_of[way]])

    def _time_new_weights(self, rows_of: dict[str, list[int]]) -> None:
        """Time each eager way's calls of the whole problem with weights that it has not had.

        They lie over each other in one tensor: where they begin makes them others.
        """
        size, count, others = self.weight.numel(), self.plan.singles, rows_of[""]
        memory = self.weight.new_ones(size + _APART * count * len(EAGER))
        for index, way in enumerate(EAGER):
            if way not in self.calls:
                continue
            starts = range(index * count * _APART, (index + 1) * count * _APART, _APART)
            views = [memory[start : start + size].view(self.weight.shape) for start in starts]
            calls = [self.product.call(way, [view]) for view in views]
            if way == LAYER:  # the first call of a layer takes longer
                if not others:
                    self._fail(way, ["new_weight"], "unsupported", "there is no other number of rows above half of M")
                    continue
                for call in calls:
                    call(self._rows_of_a(others[-1]), others[-1])
            self._time(way, "new_weight", [(call, self.a, self.plan.shape.m) for call in calls])

    def _profile(self, way: str) -> None:
        """Profile repeated calls on rank 0, and keep the profile; collective."""
        plan, call, a, profiler = self.plan, self.calls[way], self._a_of(way), cProfile.Profile()
        times = self._times_of(way, plan.profiled)
        for start in range(0, times, burst := self._times_of(way, plan.burst)):
            self.ctx.barrier()
            if self.rank == 0:
                profiler.enable()
            for _ in range(min(burst, times - start)):
                call(a, plan.shape.m)
            profiler.disable()
        self.ctx.barrier()
        if self.rank == 0:
            name = f"{plan.family}_{plan.shape}_{plan.variant.replace(':', '-')}_{way}.pstats"
            path = Path(plan.folder, name)
            profiler.dump_stats(path)
            stats: Any = pstats.Stats(profiler)
            own = {_name(*function): row[2] * 1e6 / times for function, row in stats.stats.items()}
            most = sorted(own, key=lambda function: -own[function])[:_SHOWN]
            self.profiles.append(Profile(str(path), [(function, own[function]) for function in most]))

    def _outcome(self, way: str, kind: str, config: str) -> Outcome:
        plan, shape, row = self.plan, self.plan.shape, (way, kind)
        status, reason = self.failures.get(row, ("ok", ""))
        spent = sorted(self.samples[row]) if status == "ok" else []
        median = lowest = p90 = highest = None
        if spent and spent[0] <= 0:
            reason = f"bursts of {SMALL} took no less than those of {LARGE}: something else kept the host busy"
        elif spent:
            median, lowest, highest = statistics.median(spent), spent[0], spent[-1]
            p90 = spent[math.ceil(0.9 * len(spent)) - 1]
        problem = (plan.family, shape.m, shape.n, shape.k, plan.variant)
        calls = self.counts.get(row) if status == "ok" else None
        return Outcome(*problem, way, kind, median, lowest, p90, highest, calls, status, reason, config)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within the block Python collects no garbage, as in `timeit`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _name(file: str, line: int, function: str) -> str:
    """Return a function as a profile shows it, by the last parts of its file's path."""
    return function if file == "~" else f"{'/'.join(Path(file).parts[-3:])}:{line} {function}"
