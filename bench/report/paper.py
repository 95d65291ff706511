"""The paper's six shapes: its patterns and those of this repository over its own baseline, beside what it reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from overlap_taxonomy import Agent, Mainloop, Schedule, Variant, list_variants

from ..records import frames
from ..records.record import LIBRARY
from .evidence import in_one_folder, is_timed, several, short_name
from .markdown import table, times, us

BASELINE = "library_list"  # torch.mm, then an all-gather into a list of column slices
_MOST = 1.79  # speedup of GEMM + all-scatter over PyTorch and RCCL: arXiv 2511.12500, abstract
_FAMILY = "gemm_all_scatter"
_ALONE = "gemm_alone"
# Who communicates in the patterns that the paper measures; it leaves warps that communicate to others.
_AGENTS = (Agent.ALL_SMS, Agent.COMM_KERNEL, Agent.COMPUTING_PROGRAM, Agent.COMM_PROGRAMS)


def paper_rows() -> pd.DataFrame:
    """Return the paper's shapes on several GPUs, each in the last folder with its baseline, and speedups over that."""
    rows = pd.concat([machine.all_rows for machine in several()])
    rows = rows[(rows.family == _FAMILY) & (rows.shape_set == "paper")]
    return frames.over(in_one_folder(rows, is_timed(rows) & (rows.variant == BASELINE)), BASELINE)


def beside_the_paper() -> str:
    """Return the speedup of each pattern over the paper's baseline on its six shapes, below what the paper reports."""
    rows = paper_rows()
    rows = rows[rows.speedup_vs_library.notna()]
    measured = set(rows.variant)
    variants = [one for one in list_variants(_FAMILY) if one.name in measured and one.has_kernels]
    patterns = [one.name for one in variants if _is_of_the_paper(one)]
    shown = [*patterns, *(one.name for one in variants if one.name not in patterns)]
    spent_header = [f"`{BASELINE}`, µs", "NCCL + cuBLAS, µs", "GEMM alone, µs"]
    lines = [
        ["MI300X, the paper", "all six", *[""] * len(spent_header), f"up to {times(_MOST)}", *[""] * (1 + len(shown))]
    ]
    for machine in several():
        at = rows[(rows.device_name == machine.device_name) & (rows.world_size == machine.world_size)]
        for _, problem in at.groupby(["m", "n", "k"], sort=False):
            first = frames.rows_of(problem)[0]
            spent, over = (problem.set_index("variant")[name].to_dict() for name in ("time_us", "speedup_vs_library"))
            cells = [us(spent.get(name, math.nan)) for name in (BASELINE, LIBRARY, _ALONE)]
            cells += [_most(over, patterns), _most(over, shown), *(times(over.get(name, math.nan)) for name in shown)]
            lines.append([machine.title, f"{first.m}, {first.n}, {first.k}", *cells])
    header = ["GPUs", "M, N, K", *spent_header, "fastest of the paper's patterns", "fastest of all"]
    return table([*header, *(f"`{name}`" for name in shown)], lines)


def is_it_reached() -> str:
    """Return in words whether the paper's highest speedup is reached, by which patterns, and over which baseline."""
    rows = paper_rows()
    kernels = {one.name: _is_of_the_paper(one) for one in list_variants(_FAMILY) if one.has_kernels}
    problem = [*frames.PROBLEM, "folder"]
    library = rows[rows.variant == LIBRARY].set_index(problem).time_us
    rows = rows[rows.variant.isin(kernels) & rows.speedup_vs_library.notna()]
    rows = rows.assign(over_both=library.reindex(pd.MultiIndex.from_frame(rows[problem])).to_numpy() / rows.time_us)
    of_paper, others = (rows[rows.variant.map(kernels) == is_of_paper] for is_of_paper in (True, False))
    is_reached = of_paper.speedup_vs_library.max() >= _MOST
    said = f"{'Yes' if is_reached else 'No'}: the paper has {times(_MOST)} at most over PyTorch and RCCL, on MI300X."
    for whose, at in (("Its patterns", of_paper), ("Patterns of this repository", others)):
        best = frames.rows_of(at.sort_values("speedup_vs_library"))[-1]
        where = f"`{best.variant}`, {best.m}, {best.n}, {best.k}, {best.world_size} × {short_name(best.device_name)}"
        said += (
            f" {whose} reach {times(best.speedup_vs_library)} here over the paper's baseline, `{BASELINE}` ({where}), "
            f"and {times(at.over_both.max())} over NCCL + cuBLAS, which leaves C in blocks."
        )
    return said


def _most(over: Mapping[Any, float], names: list[str]) -> str:
    return times(max(over[name] for name in names if name in over))


def _is_of_the_paper(variant: Variant) -> bool:
    is_plain = variant.mainloop is Mainloop.PORTABLE and variant.schedule is Schedule.DATA_PARALLEL
    return is_plain and variant.agent in _AGENTS
