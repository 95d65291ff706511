"""The cost model: the predicted time of a call of each variant of each family, from a machine's constants.

Each variant brings its own prediction, made of the parts in cost.py; docs/design.md has the formulas.
"""

from __future__ import annotations

from .axes import Mainloop
from .cost import SUMMING_FAMILIES, Work, aligned_us, gemm
from .machine import Machine
from .registry import find_variant, list_families


def predict_us(machine: Machine, variant: str, work: Work) -> float | None:
    """Return the predicted time of a call among others, in µs; None for a variant that is not modelled, or not there.

    Args:
        machine, work: where, and what.
        variant: its full name.

    Raises:
        ValueError: the model does not know the family.
    """
    if work.family not in (families := list_families()):
        raise ValueError(f"no model of family {work.family!r}; known families: {', '.join(families)}")
    one = find_variant(work.family, variant)
    if one is None or one.predict is None or (one.mainloop is Mainloop.SM90 and not machine.is_hopper):
        return None
    us = one.predict(machine, work)
    return us + aligned_us(machine, work, *_operands(work)) if copies_operands(machine, variant, work) else us


def predict_ideal_us(machine: Machine, work: Work, wire_bytes: int) -> float:
    """Return the predicted time of a perfect overlap, in µs: the library's GEMM alone, or the bytes on the link.

    Args:
        machine, work: where, and what.
        wire_bytes: what a rank must send at least; the family's problem knows.
    """
    n, k = (work.n, work.share(work.k)) if work.family in SUMMING_FAMILIES else (work.share(work.n), work.k)
    alone_us = gemm(machine, work, work.m, n, k, kind="library").us + machine.launch_us
    return max(alone_us, wire_bytes / max(machine.link_gbps, machine.engine_gbps) / 1e3)


def copies_operands(machine: Machine, variant: str, work: Work) -> bool:
    """Return whether a call of one of our variants begins with a copy of A and B, whose rows are not on 16 bytes."""
    one = find_variant(work.family, variant)
    if one is None or not one.has_kernels or one.reads_pointers:
        return False
    return machine.has_descriptors(work.element_bytes) and work.reads_narrow_rows


def _operands(work: Work) -> tuple[int, int, int]:
    """Return rows, columns and the sum's length of what a rank is given."""
    if work.family in SUMMING_FAMILIES:
        return work.m, work.n, work.share(work.k)
    return work.share(work.m) if work.family == "all_gather_gemm" else work.m, work.share(work.n), work.k
