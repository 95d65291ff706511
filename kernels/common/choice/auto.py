"""The variant `auto`: makes the operator of whichever variant was measured, or else is predicted, to be fastest.

What is known, in this order: the user's tuning cache, the times that come with the library, the cost model, corrected
by what these say of problems like this one (neighbours.py). The library baseline is always among the candidates, and
another variant is chosen only where it is faster by a margin. All ranks decide alike, from the tables of rank 0, which
they have from when the context first needs them; so a call of another number of rows may take another variant, and no
rank is asked. Nothing is measured here; ``iris-bench tune`` does that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from iris_core import Context
from overlap_taxonomy import (
    Agent,
    Arrangement,
    Choice,
    Machine,
    Mainloop,
    Schedule,
    Sync,
    Variant,
    Work,
    get_variant,
    list_variants,
    machine_for,
    predict_us,
)

from ..config import GemmConfig
from ..operator import Operator
from ..problem import Problem
from .measured import Table, device_name, from_json, key_of, setup_of, shipped_table, to_json
from .neighbours import estimate, is_narrow
from .tuning_cache import read_cache

NAME = "auto"
# By how much another variant must be faster than the library: times of one machine differ from run to run, and the
# model is off, by so much where its constants were measured and by more where they were not, or where rows are not on
# 16 bytes, of which few problems were measured.
MEASURED_MARGIN = 0.02
NEAR_MARGIN = 0.08  # of predicted times, where both were measured on problems like it
MODEL_MARGIN = 0.10
PREDICTION_MARGIN = 0.25
SHORT_MARGIN = 0.15  # of predicted times, in calls that are shorter than this: they are launches and latency
SHORT_US = 60.0


@dataclass(frozen=True)
class Known:
    """What is known of a context's machine, the same on all ranks: its GPU's name, the user's times, the library's."""

    gpu: str
    tables: tuple[Table, Table]


_known: weakref.WeakKeyDictionary[Context, Known] = weakref.WeakKeyDictionary()


def auto_variant(
    family: str,
    *,
    baseline: str = "library",
    left_out: Callable[[Mapping[str, Any]], Collection[str]] = lambda options: (),
) -> Variant:
    """Return a family's `auto`.

    Args:
        family: the family.
        baseline: the library variant whose output is what the family's function promises.
        left_out: which variants cannot do what the family's own options ask for.
    """

    def choose(ctx: Context, problem: Problem, config: GemmConfig | None, options: Mapping[str, Any]) -> Choice:
        return decide(ctx, family, problem, baseline=baseline, left_out=left_out(options))

    def build(ctx: Context, problem: Problem, config: GemmConfig | None = None, **options: Any) -> Operator[Any]:
        with ctx.collective_section(f"make {family}/{NAME}"):
            if reason := unsupported_reason(problem, config):
                raise ValueError(f"{family}/{NAME} cannot do this: {reason}")
        choice = choose(ctx, problem, None, options)
        operator = get_variant(family, choice.variant).build(ctx, problem, choice.config, **options)
        operator.chosen_by = NAME
        return operator

    return Variant(
        family=family,
        pattern=NAME,
        arrangement=Arrangement.CHOSEN,
        agent=Agent.CHOSEN,
        sync=Sync.CHOSEN,
        summary="whichever was measured or is predicted to be fastest for the problem, the library included",
        build=build,
        unsupported_reason=unsupported_reason,
        mainloop=Mainloop.CHOSEN,
        schedule=Schedule.CHOSEN,
        choose=choose,
    )


def unsupported_reason(problem: Problem, config: GemmConfig | None) -> str | None:
    """Return why `auto` cannot make an operator, or None: every problem has a variant that can do it."""
    return "it takes no configuration but chooses it; name the variant that this one is for" if config else None


def decide(ctx: Context, family: str, problem: Problem, *, baseline: str, left_out: Collection[str]) -> Choice:
    """Return what to make on this context's machine; the first time collective, see `known_of`."""
    candidates = _candidates(family, problem, baseline, left_out)
    if ctx.is_interpreted() or get_variant(family, baseline).unsupported_reason(problem, None):
        why = "interpreted" if ctx.is_interpreted() else "ranks may share GPUs"
        return Choice(_untimed(family, candidates), None, why)
    known = known_of(ctx)
    num_sms = ctx.get_cu_count() if ctx.reserve_sms else None
    return choose(family, problem, candidates, gpu=known.gpu, tables=known.tables, num_sms=num_sms)


def known_of(ctx: Context) -> Known:
    """Return what is known of a context's machine; the first time rank 0 tells the others what its user measured.

    Raises:
        ValueError: rank 0's tuning cache cannot be read; on all ranks.
    """
    if ctx not in _known:
        told = None
        with ctx.collective_section("read the tuning cache"):
            if ctx.get_rank() == 0:
                gpu = device_name(ctx.get_device())
                told = gpu, to_json(setup_of(gpu), read_cache(gpu))
        gpu, measured = ctx.broadcast(told, 0)
        _known[ctx] = Known(gpu, (from_json(measured, setup_of(gpu)), shipped_table(gpu)))
    return _known[ctx]


def _untimed(family: str, candidates: Sequence[str]) -> str:
    """Return what is taken where there is no performance to choose by: interpreted kernels, ranks that share a GPU.

    Any would be right; programs that communicate beside others of their grid are what every family has.
    """
    places = {name: get_variant(family, name) for name in candidates}
    portable = [name for name, one in places.items() if one.mainloop is Mainloop.PORTABLE]
    return next((name for name in portable if places[name].agent is Agent.COMM_PROGRAMS), candidates[-1])


def choose(
    family: str,
    problem: Problem,
    candidates: Sequence[str],
    *,
    gpu: str,
    tables: tuple[Table, Table] = ({}, {}),
    num_sms: int | None = None,
) -> Choice:
    """Return the fastest of several variants.

    Args:
        family, problem: what is to be done.
        candidates: variants that can do it, the library baseline first.
        gpu: the device's name.
        tables: measured times: this user's, and those that come with the library.
        num_sms: of the GPU, where some are reserved, whom all variants do without, the library too; None for all.
    """
    machines = _Machines.of(gpu, problem.world_size, num_sms)
    known = _measured_choice(family, problem, candidates, tables, machines)
    return known or _predicted_choice(family, problem, candidates, machines, {**tables[1], **tables[0]})


@dataclass(frozen=True)
class _Machines:
    """A machine of the model, None where it has none, as times are measured on it, and with the SMs that are free.

    `num_sms` is how many these are; None for all.
    """

    whole: Machine | None
    free: Machine | None
    num_sms: int | None

    @classmethod
    def of(cls, gpu: str, world_size: int, num_sms: int | None) -> _Machines:
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


def _work_of(family: str, problem: Problem) -> Work:
    return Work(family, problem.m, problem.n, problem.k, problem.world_size, problem.dtype.itemsize)


def _measured_choice(
    family: str, problem: Problem, candidates: Sequence[str], tables: tuple[Table, Table], machines: _Machines
) -> Choice | None:
    """Return the fastest by the first table that has the problem; None if neither does, or it cannot be had here."""
    key, work = key_of(family, problem), _work_of(family, problem)
    for why, table in zip(("measured here", "measured"), tables, strict=True):
        measured = table.get(key)
        if measured and candidates[0] in measured.times_us:
            known = {name: measured.times_us[name] for name in candidates if name in measured.times_us}
            times = {name: machines.us(us, name, work) for name, us in known.items()}
            name = fastest(times, MEASURED_MARGIN)
            config = machines.fitting(measured.configs.get(name))
            if not get_variant(family, name).unsupported_reason(problem, config):
                return Choice(name, config, why)
    return None


def _predicted_choice(
    family: str, problem: Problem, candidates: Sequence[str], machines: _Machines, table: Table
) -> Choice:
    """Return the fastest by the cost model, corrected by what a table says of problems like this one."""
    baseline, machine = candidates[0], machines.free
    if machine is None:
        return Choice(baseline, None, "neither measured nor modelled")
    work = _work_of(family, problem)
    estimates = estimate(machine, work, candidates, table, measured_on=machines.whole)
    times = {name: one.us for name, one in estimates.items()}
    is_near = machine.is_measured and estimates[baseline].is_near and estimates[fastest(times, 0.0)].is_near
    if work.element_bytes > 2 and not is_near:
        return Choice(baseline, None, "neither it nor problems like it were measured in fp32")
    margin = NEAR_MARGIN if is_near else _margin(machine, work, times[baseline])
    return Choice(fastest(times, margin), None, "predicted by problems like it" if is_near else "predicted")


def _margin(machine: Machine, work: Work, library_us: float) -> float:
    """Return by how much another variant must be predicted to be faster, where no problems like it were measured."""
    if not machine.is_measured or is_narrow(work):
        return PREDICTION_MARGIN
    return SHORT_MARGIN if library_us < SHORT_US else MODEL_MARGIN


def fastest(times_us: Mapping[str, float], margin: float) -> str:
    """Return the fastest; the first, which is the library baseline, unless another is faster by a margin."""
    baseline, *others = times_us
    best = min(others, key=times_us.__getitem__, default=baseline)
    return best if times_us[best] < times_us[baseline] * (1 - margin) else baseline


def _candidates(family: str, problem: Problem, baseline: str, left_out: Collection[str]) -> list[str]:
    """The library baseline, and the other variants that can do the problem here, in the order of registration."""
    ours = [
        variant.name
        for variant in list_variants(family)
        if variant.has_kernels and variant.name not in left_out and not variant.unsupported_reason(problem, None)
    ]
    return [baseline, *ours]
