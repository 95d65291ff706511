"""What a speedup consists of: layout, overlap, a faster GEMM."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import layer_name, problem_label
from ..records import frames
from .evidence import FAMILIES, Machine, times_of

_MANY = 8192  # rows
_COPIES = ("library_layout", "library_list")  # baselines that leave C as one matrix, the first that was measured counts


@dataclass(frozen=True)
class Gains:
    """The parts of one problem's gain over a baseline that gives the same result; measured in one run, in µs.

    `baseline_us - time_us` is `layout_us + overlap_us + gemm_us`.

    Args:
        family, label: what was measured.
        baseline_us: NCCL + cuBLAS, for all-scatter with the copy that makes C one matrix.
        time_us: of the fastest variant.
        alone_us: of cuBLAS's GEMM by itself.
        layout_us: the baseline's copy, which a fused kernel does not need.
        overlap_us: communication that a fused kernel hides behind the GEMM. Of a call that takes longer than
            cuBLAS's GEMM nothing shows how fast its own GEMM is: a slower or faster one counts here.
        gemm_us: what a call is below cuBLAS's GEMM alone, which no overlap can give.
        exposed_us: what of a call is above the GEMM alone: communication that is not hidden.
    """

    family: str
    label: str
    baseline_us: float
    time_us: float
    alone_us: float
    layout_us: float
    overlap_us: float
    gemm_us: float
    exposed_us: float


def gains(machine: Machine) -> list[Gains]:
    """Return the parts of the gain for each named layer of many rows whose run has the GEMM alone."""
    copies = [times_of(machine, name) for name in _COPIES]
    rows = machine.best.assign(alone=times_of(machine, "gemm_alone"), copied=copies[0].fillna(copies[1]))
    rows = rows[(rows.m == _MANY) & rows.alone.notna() & (rows.time_us < rows.library)]
    found = []
    for row in frames.rows_of(pd.concat([rows[rows.family == family] for family in FAMILIES])):
        collective = OF_BENCH[row.family].collective
        if layer_name(collective, row.n, row.k) is None:
            continue
        label = problem_label(collective, row.m, row.n, row.k).partition(",")[0]
        baseline = row.copied if pd.notna(row.copied) and row.copied > row.library else row.library
        hidden_to = max(row.time_us, row.alone)
        found.append(
            Gains(
                row.family,
                label,
                baseline,
                row.time_us,
                row.alone,
                layout_us=baseline - row.library,
                overlap_us=row.library - hidden_to,
                gemm_us=hidden_to - row.time_us,
                exposed_us=hidden_to - row.alone,
            )
        )
    return found
