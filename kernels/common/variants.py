"""The registry's entry of an implementation."""

from __future__ import annotations

from typing import Any

from iris_core import Context
from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from .config import GemmConfig
from .implementation import Implementation
from .operators.operator import Operator
from .problem import Problem


def variant_of(
    implementation: Implementation,
    *,
    arrangement: Arrangement,
    agent: Agent,
    sync: Sync,
    summary: str,
    former_name: str = "",
) -> Variant:
    """Return the entry of an implementation, whose `build` makes an operator.

    Args:
        implementation: the variant's functions.
        arrangement, agent, sync: its place in the taxonomy.
        summary: one line for tables.
        former_name: what it was called in older versions; "" for its pattern.
    """

    def build(ctx: Context, problem: Problem, config: GemmConfig | None = None, **options: Any) -> Operator[Any]:
        return Operator(ctx, implementation, problem, config, **options)

    return Variant(
        implementation.family,
        implementation.pattern,
        arrangement,
        agent,
        sync,
        summary,
        build,
        implementation.supports,
        mainloop=implementation.mainloop,
        schedule=implementation.schedule,
        is_baseline=not implementation.is_ours,
        can_trace=implementation.can_trace and implementation.is_ours,
        predict=implementation.predict,
        reads_pointers=implementation.reads_pointers,
        former_name=former_name,
    )
