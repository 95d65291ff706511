"""The cost model: the predicted time of a call of each variant of each family, from a machine's constants.

Each variant brings its own prediction, made of the parts in gemm_cost.py, library_cost.py and transfer_cost.py;
docs/design.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from .axes import Mainloop
from .library_cost import library_gemm
from .machine import Machine
from .registry import find_variant, list_families
from .transfer_cost import aligned_us
from .variant import Variant
from .work import Work

GEMM_ALONE = "gemm_alone"  # in place of a variant: the library's GEMM by itself, which measurements have, too


def predict_us(machine: Machine, variant: str, work: Work) -> float | None:
    """Return the predicted time of a call among others, in µs; None for a variant that is not modelled, or not there.

    Args:
        machine, work: where, and what.
        variant: its full name, or `GEMM_ALONE`.

    Raises:
        ValueError: the model does not know the family.
    """
    if variant == GEMM_ALONE:
        return _gemm_alone_us(machine, work)
    one = find_variant(work.family, variant)
    if one is None and work.family not in (families := list_families()):
        raise ValueError(f"no model of family {work.family!r}; known families: {', '.join(families)}")
    if one is None or one.predict is None:
        return None
    if one.mainloop is Mainloop.SM90 and not (machine.is_hopper and work.element_bytes <= 2):
        return None
    us = one.predict(machine, work)
    return us + aligned_us(machine, work, *_operands(work)) if _copies_operands(machine, one, work) else us


@dataclass(frozen=True)
class Parts:
    """What a predicted time is made of, in µs: `work_us`, `wait_us` and `latency_us` are all of `us`.

    Args:
        us: the time.
        work_us: what is left if bytes to peers, launches and signals took no time: the GEMM, copies, sums.
        link_us: what the bytes to peers would take by themselves.
        wait_us: what of that nothing hides, and the work waits for.
        latency_us: launches, handshakes, trips and starts of copies.
    """

    us: float
    work_us: float
    link_us: float
    wait_us: float
    latency_us: float


def explain_us(machine: Machine, variant: str, work: Work) -> Parts | None:
    """Return what a predicted time is made of, by predictions for a machine that lacks something.

    Args:
        machine, variant, work: as of `predict_us`.

    Raises:
        ValueError: as of `predict_us`.
    """
    us = predict_us(machine, variant, work)
    if us is None:
        return None
    at_once = machine.without_latency()
    without_latency, work_us, link_us = (
        predict_us(one, variant, work) or 0.0 for one in (at_once, at_once.without_links(), at_once.without_work())
    )
    return Parts(us, work_us, link_us, without_latency - work_us, us - without_latency)


def predict_ideal_us(machine: Machine, work: Work, wire_bytes: int) -> float:
    """Return the predicted time of a perfect overlap, in µs: the library's GEMM alone, or the bytes on the link.

    Args:
        machine, work: where, and what.
        wire_bytes: what a rank must send at least; the family's problem knows.
    """
    return max(_gemm_alone_us(machine, work), wire_bytes / max(machine.link_gbps, machine.engine_gbps) / 1e3)


def _gemm_alone_us(machine: Machine, work: Work) -> float:
    return library_gemm(machine, work).us + machine.launch_us


def copies_operands(machine: Machine, variant: str, work: Work) -> bool:
    """Return whether a call begins with a copy of A and B, whose rows are not on 16 bytes.

    Args:
        machine, work: as of `predict_us`.
        variant: its full name; one that is not known copies nothing.
    """
    one = find_variant(work.family, variant)
    return one is not None and _copies_operands(machine, one, work)


def _copies_operands(machine: Machine, variant: Variant, work: Work) -> bool:
    is_off = work.reads_narrow_rows and machine.has_descriptors(work.element_bytes)
    return is_off and variant.has_kernels and variant.mainloop is not Mainloop.LIBRARY


def _operands(work: Work) -> tuple[int, int, int]:
    """Return rows, columns and the sum's length of what a rank is given."""
    m, n, k = work.product
    return work.share(m) if work.partition.gathers else m, n, k
