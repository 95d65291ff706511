"""The number of chunks of a call over several hosts."""

from __future__ import annotations

from iris_core.hierarchical import HierarchicalContext

from overlap_taxonomy import Choice

from ..problem import Problem
from .call import Hierarchy

_UNTIMED_CHUNKS = 2  # where there is no performance to choose by: interpreted kernels


def chunks_for(ctx: HierarchicalContext, hierarchy: Hierarchy, problem: Problem) -> int:
    """Return into how many chunks what crosses hosts is cut; the same on all ranks."""
    return _UNTIMED_CHUNKS


def choose_over_hosts(ctx: HierarchicalContext, family: str, problem: Problem, *, baseline: str, others: str) -> Choice:
    return Choice(others, None, "interpreted")
