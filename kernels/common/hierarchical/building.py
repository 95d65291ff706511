"""Which kind of operator a context gets: one of its ranks alone, or over several hosts."""

from __future__ import annotations

from typing import Any

from iris_core import Context
from iris_core.context.hierarchical import HierarchicalContext
from overlap_taxonomy import Choice, get_variant

from ..config import GemmConfig
from ..problem import Problem
from ..variants.implementation import Implementation
from .call import hierarchies, hierarchy_of
from .choosing import schedules_for
from .operator import HierarchicalOperator


def spans_hosts(ctx: Context) -> bool:
    """Return whether a context's ranks live on several hosts."""
    return isinstance(ctx, HierarchicalContext)


def over_hosts(
    ctx: Context, implementation: Implementation, problem: Problem, config: GemmConfig | None, **options: Any
) -> HierarchicalOperator[Any]:
    """Return an operator over several hosts, whose operators inside a host are of this variant; collective.

    Raises:
        ValueError: the variant cannot do the problem, or cannot span hosts; or as `HierarchicalOperator`.
    """
    assert isinstance(ctx, HierarchicalContext)
    family, variant = implementation.family, implementation.variant
    with ctx.collective_section(f"make {family}/{variant}"):
        able, reason = sorted(hierarchies), implementation.supports(problem, config)
        if not implementation.is_ours or family not in able:
            reason = (
                f"it is for ranks of one host, and these live on {ctx.topology.num_hosts}; variants with kernels of "
                f"this library, and library, of {', '.join(able)} can span hosts"
            )
        if reason:
            raise ValueError(f"{family}/{variant} cannot do this: {reason}")
    return HierarchicalOperator(ctx, family, problem, variant, config, **options)


def choose_over_hosts(ctx: Context, family: str, problem: Problem, others: str) -> Choice:
    """Return the library's variant over all ranks, or `others`, what is built over hosts, as is predicted to be faster.

    Where the library cannot do the problem that is `others`. Collective the first time for a product, and for more
    rows.
    """
    assert isinstance(ctx, HierarchicalContext)
    hierarchy = hierarchy_of(family)
    if reason := get_variant(family, hierarchy.baseline).unsupported_reason(problem, None):
        return Choice(others, None, f"{hierarchy.baseline} cannot do this: {reason}")
    schedules = schedules_for(ctx, family, hierarchy, problem, others)
    is_library = schedules.is_library[schedules.index(problem.m)]
    return Choice(hierarchy.baseline if is_library else others, None, schedules.why)
