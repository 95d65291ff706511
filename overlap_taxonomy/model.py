"""The cost model: the predicted time of a call of each variant of each family, from a machine's constants.

A GEMM is waves of tiles over the SMs. What is told apart is what may run beside it, and what cannot: the first wave has
nothing to send, the bytes of the last one leave when there is nothing left to multiply. A call takes the longer of the
work and the communication, and what neither hides; docs/design.md has the formulas and how far they are off.
"""

from __future__ import annotations

from .axes import Agent, Mainloop
from .cost import SUMMING_FAMILIES, Work, aligned_us, gemm
from .machine import Machine
from .patterns import all_gather, all_scatter, reductions
from .patterns.common import Pattern, Place
from .registry import find_variant

# By family: of baselines by name, of ours by their places in the taxonomy.
FAMILIES: dict[str, tuple[dict[str, Pattern], dict[Place, Pattern]]] = {
    "gemm_all_scatter": (all_scatter.BASELINES, all_scatter.PLACES),
    "all_gather_gemm": (all_gather.BASELINES, all_gather.PLACES),
    "gemm_reduce_scatter": (reductions.REDUCE_SCATTER_BASELINES, reductions.REDUCE_SCATTER),
    "gemm_all_reduce": (reductions.ALL_REDUCE_BASELINES, reductions.ALL_REDUCE),
}


_READ_THROUGH_POINTERS = {("all_gather_gemm", Place(Agent.COMPUTING_PROGRAM))}  # from peers


def predict_us(machine: Machine, variant: str, work: Work) -> float | None:
    """Return the predicted time of a call among others, in µs; None for a variant that is not modelled, or not there.

    Args:
        machine, work: where, and what.
        variant: its full name.

    Raises:
        ValueError: the model does not know the family.
    """
    if work.family not in FAMILIES:
        raise ValueError(f"no model of family {work.family!r}; known families: {', '.join(FAMILIES)}")
    baselines, places = FAMILIES[work.family]
    place = _place_of(work.family, variant)
    pattern = places.get(place) if place else baselines.get(variant)
    if pattern is None or (place and place.mainloop is Mainloop.SM90 and not machine.is_hopper):
        return None
    us = pattern(machine, work)
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
    place = _place_of(work.family, variant)
    if work.family not in FAMILIES or place is None or (work.family, place) in _READ_THROUGH_POINTERS:
        return False
    return machine.has_descriptors(work.element_bytes) and work.reads_narrow_rows


def _place_of(family: str, name: str) -> Place | None:
    """Return where a variant of ours stands in the taxonomy; None for a baseline, and for what is not there."""
    variant = find_variant(family, name)
    return Place(variant.agent, variant.mainloop, variant.schedule) if variant and variant.has_kernels else None


def _operands(work: Work) -> tuple[int, int, int]:
    """Return rows, columns and the sum's length of what a rank is given."""
    if work.family in SUMMING_FAMILIES:
        return work.m, work.n, work.share(work.k)
    return work.share(work.m) if work.family == "all_gather_gemm" else work.m, work.share(work.n), work.k
