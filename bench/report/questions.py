"""The tables of the report, docs/report.md: one or two a question."""

from __future__ import annotations

import pandas as pd

from overlap_taxonomy import Agent, Mainloop, Schedule, Variant, list_variants

from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import layer_name
from ..records import frames
from .evidence import FAMILIES, HELD_OUT, OTHERS, Machine, dtypes, machines
from .gains import Gains, gains
from .markdown import SHORT, mean_and_lowest, sizes, table, times, us
from .predictions import auto_over_fastest, predicted, taken_over_fastest
from .tables import PAPER_BASELINE, paper_rows

PAPER_MOST = 1.79  # speedup of GEMM + all-scatter over PyTorch and RCCL: arXiv 2511.12500, abstract
# Who communicates in the patterns that the paper measures; it leaves warps that communicate to others.
_PAPER_AGENTS = (Agent.ALL_SMS, Agent.COMM_KERNEL, Agent.COMPUTING_PROGRAM, Agent.COMM_PROGRAMS)
_SHOWN_LOSSES = 12
_ROWS_OF_LAYERS = (8192, 64)


def several() -> list[Machine]:
    """Return the machines of several GPUs: on one there is nothing to overlap."""
    return [machine for machine in machines().values() if machine.world_size > 1]


def in_time(machine: Machine) -> pd.DataFrame:
    """Return the fastest variant of each problem in which the host was not late with the calls of `library`."""
    return machine.best[~machine.best.held_up]


def is_it_faster() -> str:
    """Return how many problems are faster than NCCL + cuBLAS, in words, then by machine and family."""
    best = pd.concat([in_time(machine) for machine in several()])
    wins, mean = int((best.time_us < best.library).sum()), frames.geomean(best.library / best.time_us)
    said = (
        f"On several GPUs in bf16 the fastest variant is faster than NCCL + cuBLAS in **{wins} of {len(best)}** "
        f"problems, {times(mean)} in the geometric mean."
    )
    lines = []
    for machine in (one for dtype in dtypes() for one in machines(dtype).values()):
        for family in FAMILIES:
            at = in_time(machine)
            at = at[at.family == family]
            if at.empty:
                continue
            speedups = at.library / at.time_us
            others = [mean_and_lowest(at[name] / at.time_us) for name in OTHERS]
            cells = [str(len(at)), str(int((speedups > 1).sum())), mean_and_lowest(speedups), times(speedups.max())]
            lines.append([machine.title, machine.dtype, SHORT[family], *cells, *others])
    header = ["GPUs", "dtype", "family", "problems", "faster in", "mean, lowest", "highest"]
    return f"{said}\n\n" + table([*header, *(f"over `{name}`: mean, lowest" for name in OTHERS)], lines)


def for_which_layer() -> str:
    """Return the speedup over NCCL + cuBLAS of each layer of a language model, for many rows and few."""
    places = [(machine, m) for machine in several() for m in _ROWS_OF_LAYERS]
    found: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for machine, m in places:
        best = in_time(machine)
        for row in frames.rows_of(best[best.m == m]):
            layer = layer_name(OF_BENCH[row.family].collective, row.n, row.k)
            if layer:
                found.setdefault((row.family, layer), {})[machine.name, m] = times(row.library / row.time_us)
    lines = [
        [SHORT[family], layer, *(cells.get((machine.name, m), "") for machine, m in places)]
        for (family, layer), cells in sorted(found.items(), key=lambda item: FAMILIES.index(item[0][0]))
    ]
    return table(["family", "layer", *(f"{machine.title}, M = {m}" for machine, m in places)], lines)


def by_which_pattern() -> str:
    """Return in how many problems each variant is the fastest of ours, and how it does where it was measured."""
    lines = []
    for machine in several():
        timed = machine.rows[(machine.rows.status == "ok") & machine.rows.time_us.notna()]
        fastest = machine.best.set_index(frames.PROBLEM).time_us
        for family in FAMILIES:
            best = machine.best[machine.best.family == family]
            for variant, won in best.variant.value_counts().items():
                at = timed[(timed.family == family) & (timed.variant == variant)].set_index(frames.PROBLEM).time_us
                slower = (at / fastest.reindex(at.index)).dropna()
                rows = best[best.variant == variant].m
                span = f"{rows.min()} to {rows.max()}" if rows.min() < rows.max() else str(rows.min())
                cells = [f"{won} of {len(best)}", span, f"{frames.geomean(slower):.2f}, {slower.max():.2f}"]
                lines.append([machine.title, SHORT[family], f"`{variant}`", *cells])
    header = ["GPUs", "family", "variant", "fastest in", "there, M", "time over the fastest's: mean, most"]
    return table(header, lines)


def on_16_bytes(best: pd.DataFrame) -> pd.DataFrame:
    """Return the problems with an overlap efficiency whose rows are on 16 bytes: cuBLAS is no limit of the others."""
    return best[best.overlap_efficiency.notna() & (best.n % 8 == 0) & (best.k % 8 == 0)]


def how_far_from_the_limit() -> str:
    """Return overlap efficiency, ideal over time, by machine, family and number of rows."""
    groups = (("M ≤ 128", 1, 128), ("M = 129 to 1024", 129, 1024), ("M > 1024", 1025, 1 << 30))
    lines = []
    for machine in several():
        best = on_16_bytes(machine.best)
        for family in FAMILIES:
            cells = []
            for _, low, high in groups:
                at = best[(best.family == family) & best.m.between(low, high)].overlap_efficiency
                cells.append(f"{frames.geomean(at):.2f} ({at.min():.2f} to {at.max():.2f})" if len(at) else "")
            if any(cells):
                lines.append([machine.title, SHORT[family], *cells])
    return table(["GPUs", "family", *(name for name, _, _ in groups)], lines)


def what_the_gain_consists_of() -> str:
    """Return the parts of the gain for each layer of many rows, µs."""
    lines = []
    for machine in several():
        for one in gains(machine):
            parts = [one.layout_us, one.overlap_us, one.gemm_us, one.exposed_us]
            cells = [us(one.baseline_us), us(one.time_us), times(one.baseline_us / one.time_us)]
            lines.append([machine.title, SHORT[one.family], one.label, *cells, *(_part(one, part) for part in parts)])
    header = ["GPUs", "family", "problem", "baseline", "iris-overlap", "speedup"]
    return table([*header, "saved: layout", "overlap", "faster GEMM", "not hidden"], lines)


def _part(one: Gains, part_us: float) -> str:
    return f"{us(part_us)} ({part_us / one.baseline_us:.0%})" if part_us else ""


def where_does_it_lose() -> str:
    """Return the problems on several GPUs in which the fastest variant is slowest, beside NCCL + cuBLAS."""
    lines = []
    best = pd.concat([in_time(machine).assign(gpus=machine.title) for machine in several()])
    slower = best[best.time_us > best.library].sort_values("speedup_vs_library")
    for row in frames.rows_of(slower.head(_SHOWN_LOSSES)):
        cells = [sizes(row.m, row.n, row.k), us(row.library), us(row.time_us), times(row.library / row.time_us)]
        lines.append([row.gpus, SHORT[row.family], *cells, f"`{row.variant}`", row.timestamp[:10]])
    more = f" The {_SHOWN_LOSSES} slowest:" if len(slower) > _SHOWN_LOSSES else ""
    said = f"In {len(slower)} of {len(best)} problems on several GPUs in bf16 the fastest variant is slower.{more}"
    header = ["GPUs", "family", "M × N × K", "NCCL + cuBLAS", "iris-overlap", "speedup", "variant", "measured"]
    return f"{said}\n\n" + table(header, lines)


def was_the_prediction_right() -> str:
    """Return the error of predicted times, and what the choices by prediction and by `auto` cost."""
    lines = []
    for machine in machines().values():
        rows = predicted(machine)
        for label, at in (
            ("problems that constants and tables know", rows[rows.shape_set != HELD_OUT]),
            ("layers that tuned nothing", rows[rows.shape_set == HELD_OUT]),
        ):
            if at.empty:
                continue
            errors = (at.predicted_us / at.time_us - 1).abs()
            cells = [str(len(at)), f"{errors.median():.1%}", f"{errors.quantile(0.9):.0%}"]
            costs = (taken_over_fastest(at), auto_over_fastest(at))
            lines.append([machine.title, label, *cells, *map(_cost, costs)])
    header = ["GPUs", "", "times", "error: median", "90 %", "taken by the model, over the fastest: mean, most"]
    return table([*header, "`auto`, over the fastest: mean, most"], lines)


def _cost(over: pd.Series) -> str:
    return f"{frames.geomean(over):.3f}, {over.max():.2f} ({len(over)} problems)" if len(over) else ""


def beside_the_paper() -> str:
    """Return the speedup of each pattern over the paper's baseline on its six shapes, beside the paper's most."""
    rows = frames.over(paper_rows(lambda rows: rows.variant == PAPER_BASELINE), PAPER_BASELINE)
    rows = rows[rows.speedup_vs_library.notna()]
    measured = set(rows.variant)
    variants = [one for one in list_variants(rows.family.iloc[0]) if one.name in measured and not one.is_baseline]
    patterns = [one.name for one in variants if _is_of_the_paper(one)]
    shown = [*patterns, *(one.name for one in variants if one.name not in patterns)]
    lines = []
    most: dict[tuple[str, str], float] = {}
    for machine in several():
        at = rows[(rows.device_name == machine.device_name) & (rows.world_size == machine.world_size)]
        for _, problem in at.groupby(["m", "n", "k"], sort=False):
            speedups = dict(zip(problem.variant, problem.speedup_vs_library, strict=True))
            first = frames.rows_of(problem)[0]
            cells = [us(first.library_us), *(times(speedups.get(name, float("nan"))) for name in shown)]
            lines.append([machine.title, f"{first.m}, {first.n}, {first.k}", *cells, first.timestamp[:10]])
            for group, names in (("the paper's patterns", patterns), ("all patterns here", shown)):
                key = machine.title, group
                most[key] = max([most.get(key, 0.0), *(speedups[name] for name in names if name in speedups)])
    said = "; ".join(f"{gpus}, {group}: up to {times(ratio)}" for (gpus, group), ratio in most.items())
    header = ["GPUs", "M, N, K", f"`{PAPER_BASELINE}`, µs", *(f"`{name}`" for name in shown), "measured"]
    paper_says = f"The paper, on AMD's MI300X over PyTorch and RCCL: up to {times(PAPER_MOST)}."
    return f"{paper_says} Here: {said}.\n\n" + table(header, lines)


def _is_of_the_paper(variant: Variant) -> bool:
    is_plain = variant.mainloop is Mainloop.PORTABLE and variant.schedule is Schedule.DATA_PARALLEL
    return is_plain and variant.agent in _PAPER_AGENTS


def front_page(machine: Machine, name: str, gather: tuple[int, int], scatter: tuple[int, int]) -> str:
    """Return what a model's two longest layers reach at 8192 rows, in words.

    Args:
        machine, name: where, and the model.
        gather, scatter: N and K of the layer behind the all-gather, and of that before the reduce-scatter.
    """
    best = {(row.family, row.n, row.k): row for row in frames.rows_of(machine.best) if row.m == 8192}
    layers = (("gate", "all_gather_gemm", gather), ("down", "gemm_reduce_scatter", scatter))
    said = []
    for layer, family, (n, k) in layers:
        row = best[family, n, k]
        over = f"{times(row.library / row.time_us)} over NCCL + cuBLAS"
        if pd.notna(row.async_tp):
            over += f" ({times(row.async_tp / row.time_us)} over torch's async-TP)"
        said.append(f"{over} for `{layer}` with its {SHORT[family]} ({sizes(8192, n, k)})")
    return f"On {machine.title} in bf16 {name} reaches {' and '.join(said)}."
