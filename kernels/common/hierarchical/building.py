"""Which kind of operator a context gets: one of its ranks alone, or over several hosts."""

from __future__ import annotations

from typing import Any

from iris_core import Context
from iris_core.context.hierarchical import HierarchicalContext
from overlap_taxonomy import Choice, get_variant, list_families

from ..config import GemmConfig
from ..problem import Problem
from ..variants.implementation import Implementation
from .call import Hierarchy
from .choosing import schedules_for
from .operator import HierarchicalOperator

_hierarchies: dict[str, Hierarchy] = {}  # by family


def register_hierarchy(family: str, hierarchy: Hierarchy) -> None:
    """Let operators of a family span hosts."""
    _hierarchies[family] = hierarchy


def hierarchy_of(family: str) -> Hierarchy:
    """Return how a family is done over several hosts.

    Raises:
        ValueError: it has no schedule for that.
    """
    list_families()  # which registers them
    if family not in _hierarchies:
        raise ValueError(f"{family} has no schedule over several hosts; families that have: {', '.join(_hierarchies)}")
    return _hierarchies[family]


def spans_hosts(ctx: Context) -> bool:
    """Return whether a context's ranks live on several hosts."""
    return isinstance(ctx, HierarchicalContext)


def over_hosts(
    ctx: Context, implementation: Implementation, problem: Problem, config: GemmConfig | None, **options: Any
) -> HierarchicalOperator[Any]:
    """Return an operator over several hosts, whose operators inside a host are of this variant; collective.

    Raises:
        ValueError: the variant cannot do the problem, or cannot span hosts.
    """
    assert isinstance(ctx, HierarchicalContext)
    family, variant = implementation.family, implementation.variant
    with ctx.collective_section(f"make {family}/{variant}"):
        if reason := _one_host_reason(ctx, implementation) or implementation.supports(problem, config):
            raise ValueError(f"{family}/{variant} cannot do this: {reason}")
    return build_over_hosts(ctx, family, problem, variant, config, **options)


def _one_host_reason(ctx: HierarchicalContext, implementation: Implementation) -> str | None:
    if implementation.is_ours and implementation.family in _hierarchies:
        return None
    able = f"variants with kernels of this library, and library, of {', '.join(sorted(_hierarchies))}"
    return f"it is for ranks of one host, and these live on {ctx.topology.num_hosts}; {able} can span hosts"


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


def build_over_hosts(
    ctx: Context,
    family: str,
    problem: Problem,
    variant: str,
    config: GemmConfig | None = None,
    *,
    new_outputs: bool = True,
    config_of: Any = None,
    **options: Any,
) -> HierarchicalOperator[Any]:
    """Return an operator over several hosts; collective.

    Args:
        ctx, family, problem: where, and what.
        variant, config: of the operators inside a host.
        new_outputs: each call returns new memory, also where none is asked for.
        config_of: not taken: the operators inside a host choose by problems of their own.
        options: the family's own.

    Raises:
        ValueError: the family has no schedule over hosts; or as `HierarchicalOperator`.
    """
    assert isinstance(ctx, HierarchicalContext)
    return HierarchicalOperator(ctx, family, hierarchy_of(family), problem, variant, config, options)
