"""The variant `auto`: makes the operator of whichever variant was measured, or else is predicted, to be fastest.

What is known, in this order: the user's tuning cache, the times that come with the library, the cost model, corrected
by what these say of problems like this one (corrections.py). The library baseline is always among the candidates, and
another variant is chosen only where it is faster by more than what is not known well (ranking.py); where the baseline
cannot do a problem, the predicted times of the other variants decide alone. Rank 0 ranks the
variants of a product for all numbers of rows when it is first asked for, which is collective, and the others have its
table; so a call of another number of rows may take another variant, and no rank is asked. No variant is measured here;
``iris-bench tune`` does that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from iris_core import Context
from iris_core.utils.settings import ranks_per_gpu
from overlap_taxonomy import (
    Agent,
    Arrangement,
    Choice,
    Mainloop,
    Schedule,
    Sync,
    Variant,
    get_variant,
    list_variants,
)

from ..calibration.first_use import calibrated_machine
from ..config import GemmConfig
from ..hierarchical.choosing import choose_over_hosts
from ..hierarchical.operator import HierarchicalOperator, spans_hosts
from ..problem import Problem
from .choices import Choices
from .knowledge import Knowledge
from .measured import device_name, from_json, setup_of, shipped_tables, to_json
from .ranking import Ranking
from .tuning_cache import read_cache

NAME = "auto"


@dataclass
class _Known:
    """What is known of a context's machine, and rank 0's choices, by what does not depend on rows."""

    knowledge: Knowledge
    choices: dict[Any, Choices] = field(default_factory=dict)


_baselines: dict[str, str] = {}


def auto_variant(family: str, *, baseline: str = "library") -> Variant:
    """Return a family's `auto`.

    Args:
        family: the family.
        baseline: the library variant whose output is what the family's function promises.
    """

    _baselines[family] = baseline

    def choose(ctx: Context, problem: Problem, config: GemmConfig | None, *, alone: bool = False) -> Choice:
        return decide(ctx, family, problem, baseline=baseline, alone=alone)

    def build(ctx: Context, problem: Problem, config: GemmConfig | None = None, **options: Any) -> Any:
        with ctx.collective_section(f"make {family}/{NAME}"):
            if reason := unsupported_reason(problem, config):
                raise ValueError(f"{family}/{NAME} cannot do this: {reason}")
        choice = choose(ctx, problem, None)
        if choice.variant == NAME:
            return HierarchicalOperator(ctx, family, problem, NAME, **options)
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


def baseline_of(family: str) -> str:
    """Return the library variant that a family's `auto` compares others with."""
    get_variant(family, NAME)
    return _baselines[family]


def unsupported_reason(problem: Problem, config: GemmConfig | None) -> str | None:
    """Return why `auto` cannot make an operator, or None: every problem has a variant that can do it."""
    return "it takes no configuration but chooses it; name the variant that this one is for" if config else None


def decide(ctx: Context, family: str, problem: Problem, *, baseline: str, alone: bool = False) -> Choice:
    """Return what to make on this context's machine; collective the first time for a product, and for more rows.

    Over several hosts `auto` itself stands for an operator that overlaps what crosses hosts, and takes inside each of
    them what is chosen there.

    Args:
        ctx, family, problem: where, and what.
        baseline: of the family; see `auto_variant`.
        alone: whether this rank asks and others may not: it then ranks the variants itself, and does not keep that.
            `known_of` must have been called.
    """
    if spans_hosts(ctx):
        return choose_over_hosts(ctx, family, problem, NAME)
    kept: _Known | None = ctx.kept.get(_Known)
    product = (family, problem.with_rows(1))
    found = kept.choices.get(product) if kept else None
    if found and found.most >= problem.m:
        return found.of(problem.m)
    if ctx.is_interpreted():
        return Choice(_untimed(family, problem), None, "interpreted")
    if ranks_per_gpu() > 1:
        return Choice(_untimed(family, problem), None, "ranks may share a GPU")
    is_ours = get_variant(family, baseline).unsupported_reason(problem, None) is not None
    instead = _untimed(family, problem) if is_ours else None
    knowledge, candidates = known_of(ctx), [baseline, *_ours(family)]
    num_sms = ctx.get_cu_count() if ctx.reserve_sms else None
    if alone:
        return Ranking(knowledge, family, problem, candidates, num_sms, instead=instead).of(problem.m)
    made = None
    with ctx.collective_section(f"choose for {family} {problem.n}x{problem.k} {problem.dtype}"):
        if ctx.get_rank() == 0:
            made = Ranking(knowledge, family, problem, candidates, num_sms, instead=instead).choices().to_json()
    found = ctx.kept[_Known].choices[product] = Choices.from_json(ctx.broadcast(made, 0))
    return found.of(problem.m)


def known_of(ctx: Context) -> Knowledge:
    """Return what is known of a context's machine; the first time rank 0 tells the others what its user measured.

    Where nothing is known, the machine is measured then; see `calibrated_machine`.

    Raises:
        ValueError: rank 0's tuning cache cannot be read; on all ranks.
    """
    kept: _Known | None = ctx.kept.get(_Known)
    if kept is None:
        told = None
        with ctx.collective_section("read what was measured"):
            if ctx.get_rank() == 0:
                gpu = device_name(ctx.get_device())
                told = gpu, to_json(setup_of(gpu), read_cache(gpu))
        gpu, measured = ctx.broadcast(told, 0)
        machine = calibrated_machine(ctx, gpu)
        kept = _Known(Knowledge(gpu, from_json(measured, setup_of(gpu)), shipped_tables(gpu), machine))
        ctx.kept[_Known] = kept
    return kept.knowledge


def _ours(family: str) -> list[str]:
    """Return the variants with kernels, in the order of registration."""
    return [one.name for one in list_variants(family) if one.has_kernels]


def _untimed(family: str, problem: Problem) -> str:
    """Return what is taken where no time says anything: of interpreted kernels, and of ranks that share a GPU.

    Any would be right; programs that communicate beside others of their grid are what every family has.
    """
    ours = [get_variant(family, name) for name in _ours(family)]
    able = [one for one in ours if not one.unsupported_reason(problem, None)]
    portable = [one for one in able if one.mainloop is Mainloop.PORTABLE and one.agent is Agent.COMM_PROGRAMS]
    return (portable or able)[0].name
