"""The cost model: the predicted time of a call of each variant of each family, from a machine's constants.

A GEMM is waves of tiles over the SMs. What is told apart is what may run beside it, and what cannot: the first wave has
nothing to send, the bytes of the last one leave when there is nothing left to multiply. A call takes the longer of the
work and the communication, and what neither hides; docs/performance.md has the formulas and how far they are off.
"""

from __future__ import annotations

from .cost import Work
from .machine import Machine
from .patterns import all_gather, all_scatter, reductions
from .patterns.common import Pattern

FAMILIES: dict[str, dict[str, Pattern]] = {
    "gemm_all_scatter": all_scatter.PATTERNS,
    "all_gather_gemm": all_gather.PATTERNS,
    "gemm_reduce_scatter": reductions.REDUCE_SCATTER,
    "gemm_all_reduce": reductions.ALL_REDUCE,
}


def predict_us(machine: Machine, variant: str, work: Work) -> float | None:
    """Return the predicted time of a call among others, in µs; None for a variant that is not modelled, or not there.

    Raises:
        ValueError: the model does not know the family.
    """
    if work.family not in FAMILIES:
        raise ValueError(f"no model of family {work.family!r}; known families: {', '.join(FAMILIES)}")
    pattern = FAMILIES[work.family].get(variant)
    if pattern is None or (variant.startswith("warp_specialized") and not machine.is_hopper):
        return None
    return pattern(machine, work)
