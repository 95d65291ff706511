"""The registry's entry of an implementation."""

from __future__ import annotations

from typing import Any

from iris_core import Context
from overlap_taxonomy import Machine, Variant, Work

from ..config import GemmConfig
from ..hierarchical.operator import over_hosts, spans_hosts
from ..operators.operator import Operator
from ..problem import Problem
from .implementation import Implementation
from .prediction import norm_us


def variant_of(implementation: Implementation) -> Variant:
    """Return the entry of an implementation, whose `build` makes an operator, of the kind that the context takes."""

    def build(ctx: Context, problem: Problem, config: GemmConfig | None = None, **options: Any) -> Any:
        if spans_hosts(ctx) and not implementation.spans_hosts:
            return over_hosts(ctx, implementation, problem, config, **options)
        return Operator(ctx, implementation, problem, config, **options)

    def predict(machine: Machine, work: Work) -> float:
        assert implementation.predict is not None
        return implementation.predict(machine, work) + norm_us(machine, work, is_fused=implementation.norms_rows)

    return Variant(
        implementation.family,
        implementation.pattern,
        *implementation.place,
        implementation.summary,
        build,
        implementation.supports,
        mainloop=implementation.mainloop,
        schedule=implementation.schedule,
        is_baseline=not implementation.is_ours,
        can_trace=implementation.can_trace,
        predict=predict if implementation.predict else None,
        former_name=implementation.former_name,
        retired=implementation.retired,
    )
