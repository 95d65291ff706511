"""The tables of the report, docs/report.md: one or two a question."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pandas as pd

from ..benchmarks.decoder.show import best as fastest_row
from ..benchmarks.decoder.systems import IRIS, TORCH
from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import MODELS, Model
from ..records import frames
from ..records.record import LIBRARY
from .evidence import (
    FAMILIES,
    HELD_OUT,
    M_GROUPS,
    OTHERS,
    decoder_steps,
    dtypes,
    in_time,
    machine_of,
    machines,
    several,
)
from .gains import Gains, gains
from .markdown import SHORT, mean_and_lowest, ms, table, times, us, with_speedup
from .predictions import auto_over_fastest, predicted, taken_over_fastest

_MANY, _FEW = 8192, 64  # rows
_ON_FRONT = (
    ("gate", "all_gather_gemm"),
    ("gate_up", "all_gather_gemm"),
    ("down", "gemm_reduce_scatter"),
    ("down", "gemm_all_reduce"),
)
_STEPS = {
    "prefill": "prompts: {} of {:,} tokens",
    "decode": "one token of {} sequences, {:,} before each",
    "train": "training: {} sequences of {:,} tokens",
}
_COLLECTIVES = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")  # of a tensor-parallel model's layers


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
    lines = []
    for machine in several():
        best = on_16_bytes(machine.best)
        for family in FAMILIES:
            cells = []
            for _, low, high in M_GROUPS:
                at = best[(best.family == family) & best.m.between(low, high)].overlap_efficiency
                cells.append(f"{frames.geomean(at):.2f} ({at.min():.2f} to {at.max():.2f})" if len(at) else "")
            if any(cells):
                lines.append([machine.title, SHORT[family], *cells])
    return table(["GPUs", "family", *(name for name, _, _ in M_GROUPS)], lines)


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


def what_to_expect(*names: str) -> str:
    """Return the layers of some models on several GPUs, µs: many rows beside async-TP and the limit, and few."""
    best = {
        (machine.title, row.family, row.n, row.k, row.m): row
        for machine in several()
        for row in frames.rows_of(in_time(machine))
    }
    layers = [
        (f"{model.name} {layer}", family, n, k)
        for model in MODELS
        if model.name in names
        for family in _COLLECTIVES
        for layer, (n, k) in model.layers(OF_BENCH[family].collective).items()
    ]
    lines = []
    for (layer, family, n, k), machine in itertools.product(layers, several()):
        many, few = (best.get((machine.title, family, n, k, m)) for m in (_MANY, _FEW))
        if many:
            cells = [us(many.library), with_speedup(many.time_us, many.library), times(many.async_tp / many.time_us)]
            cells += [f"{many.overlap_efficiency:.2f}", with_speedup(few.time_us, few.library) if few else ""]
            lines.append([layer, SHORT[family], machine.title, *cells])
    header = ["layer", "collective", "GPUs", f"M = {_MANY}: NCCL + cuBLAS", "iris-overlap", "over `async_tp`"]
    return table([*header, "efficiency", f"M = {_FEW}: iris-overlap"], lines)


def front_page(model: Model) -> str:
    """Return what a model's long layers reach at 8192 rows, over the most GPUs on which each was measured."""
    lines = []
    for layer, family in _ON_FRONT:
        title, row = _of_most_gpus(model, layer, family)
        cells = [times(getattr(row, baseline) / row.time_us) for baseline in (LIBRARY, "async_tp")]
        lines.append([f"`{layer}`", SHORT[family], title, *cells])
    header = [f"{model.name} layer, M = {_MANY}", "collective", "GPUs"]
    return table([*header, "over NCCL + cuBLAS", "over torch's async-TP"], lines)


def front_page_steps(model: Model) -> str:
    """Return whole steps of a model in bf16, ms: torch's best system, and ours with its speedup over that."""
    lines = []
    for rows in decoder_steps():
        first, best = rows[0], fastest_row(rows, TORCH)
        if best is None or (first.model, first.dtype) != (model.name.lower(), "bf16"):
            continue
        step = f"{first.layers} layers, {_STEPS[first.phase].format(first.batch, first.sequence)}"
        found = (fastest_row(rows, [system]) for system in IRIS)
        ours = [f"{ms(one.time_us)} ({times(one.speedup_vs_torch or math.nan)})" if one else "" for one in found]
        lines.append([machine_of(first).title, step, f"{ms(best.time_us)}, `{best.system}`", *ours])
    return table(["GPUs", f"{model.name}, ms", "torch's best", *(f"`{system}`" for system in IRIS)], lines)


def _of_most_gpus(model: Model, layer: str, family: str) -> tuple[str, Any]:
    """Return the machine of most GPUs on which a layer was measured with many rows, and its row there."""
    size = model.layers(OF_BENCH[family].collective)[layer]
    for machine in several():
        for row in frames.rows_of(machine.best):
            if (row.family, row.n, row.k, row.m) == (family, *size, _MANY):
                return machine.title, row
    raise ValueError(f"{layer} of {model.name} was measured on no machine of several GPUs")
