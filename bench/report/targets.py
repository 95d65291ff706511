"""What was aimed at, beside what was measured: the tables of docs/targets.md."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import pandas as pd

from iris_kernels.common.choice.auto import NAME as AUTO
from iris_kernels.common.choice.auto import baseline_of

from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.decoder.show import best, by_step, host_mark, model_name, step_name
from ..benchmarks.decoder.systems import IRIS, LIMIT, TORCH
from ..benchmarks.host.record import HostRecord
from ..benchmarks.norm.record import NormRecord
from ..records import frames
from ..records.record import GEMM_ALONE
from .evidence import (
    FAMILIES,
    HELD_OUT,
    OTHERS,
    Machine,
    by_machine,
    decoder_steps,
    in_time,
    machine_of,
    machines,
    newest,
    several,
    times_of,
)
from .markdown import SHORT, sizes, table, us
from .predictions import auto_over_fastest, predicted
from .questions import on_16_bytes

_MODES = {"compiled": "compiled", "compiled_replayed": "in a graph"}
_SHARDED = ("torch_sequence", "async_tp")  # torch's systems whose sequences are sharded
_MANY, _FEW = 4096, 512  # rows: at least, and at most
_SETS = ("llama", "square")  # shapes that targets are of
# Of Llama-3-8B's steps on two GPUs: torch's best over ours, and the time without communication over ours.
_STEPS = {
    ("prefill", 1, 8192): (1.07, 0.98),
    ("prefill", 1, 2048): (1.50, 0.90),
    ("prefill", 4, 512): (1.30, 0.90),
    ("train", 1, 4096): (1.15, 0.92),
    ("decode", 1, 2048): (1.10, 0.95),
    ("decode", 8, 2048): (1.10, 0.95),
    ("decode", 64, 2048): (1.10, 0.95),
}
_STEPS_OF_FOUR = {("prefill", 1, 8192): 1.10, ("decode", 8, 2048): 1.15}  # of Llama-3-70B's, on four GPUs
_FP8 = {"gemm_all_scatter": 1.4, "all_gather_gemm": 1.25, "gemm_reduce_scatter": 1.25}  # over `_scaled_mm` and NCCL


def judged(value: float, shown: str = ".2f", *, least: float = -math.inf, most: float = math.inf) -> str:
    """Return a figure, and whether it is as was aimed at, before it is rounded; empty for NaN."""
    if pd.isna(value):
        return ""
    return f"{value:{shown}} {'met' if least <= value <= most else '**missed**'}"


def _ratio(above: DecoderRecord | None, below: DecoderRecord | None) -> float:
    if above is None or below is None or not above.time_us or not below.time_us:
        return math.nan
    return above.time_us / below.time_us


def steps() -> str:
    """Return Llama-3-8B's steps on two GPUs, in each mode by itself; with a † where a time is partly the host's."""
    lines = []
    for of_step in decoder_steps():
        first = of_step[0]
        aims = _STEPS.get((first.phase, first.batch, first.sequence))
        if aims is None or (first.model, first.dtype, first.world_size) != ("llama-3-8b", "bf16", 2):
            continue
        for mode, name in _MODES.items():
            rows = [row for row in of_step if row.mode == mode]
            ours, torchs, limit = (best(rows, systems) for systems in (IRIS, TORCH, (LIMIT,)))
            if ours is None or (first.phase == "decode" and mode == "compiled"):
                continue
            sharded = _ratio(best(rows, _SHARDED), best(rows, ("iris_sequence",)))
            over = judged(_ratio(torchs, ours), least=aims[0]) + host_mark(torchs, ours)
            cells = [f"{aims[0]:.2f}", over, f"{_ratio(torchs, limit):.2f}"]
            cells += [judged(sharded, least=1.05)]
            cells += [f"{aims[1]:.2f}", judged(_ratio(limit, ours), least=aims[1])]
            lines.append([machine_of(first).title, step_name(first), name, *cells])
    header = ["GPUs", "step", "mode", "aim", "over torch's best", "most that can be gained"]
    return table([*header, "sharded sequences over torch's, aim 1.05", "aim", "limit over ours"], lines)


def host_time() -> str:
    """Return the host's time for calls on two GPUs, µs."""
    lines = []
    for machine, rows in by_machine(HostRecord, lambda row: row.family).items():
        for family in dict.fromkeys(row.family for row in rows if row.device == "cuda"):
            of: dict[tuple[str, str], float] = collections.defaultdict(lambda: math.nan)
            of |= {(row.way, row.kind): row.median_us or math.nan for row in rows if row.family == family}
            cells = [judged(of["op_in_graph", "repeated"], ".0f", most=15.0)]
            cells += [judged(of["layer", "repeated"], ".0f", most=30.0)]
            cells += [judged(of["operator", "new_m"] / of["operator", "alone"], most=1.5)]
            lines.append([machine.title, SHORT[family], *cells, us(of["mm", "repeated"])])
    header = ["GPUs", "call", "op in a compiled graph, aim 15", "layer, eager, aim 30"]
    return table([*header, "first call of an M over a repeated one, aim 1.5", "`torch.mm`, for comparison"], lines)


def memory() -> str:
    """Return the peak memory of a compiled training step whose sequences are sharded, MiB; each system's newest."""
    rows = itertools.chain.from_iterable(newest(DecoderRecord, lambda row: row.thing).values())
    lines = []
    for of_step in by_step([*rows]).values():
        first = of_step[0]
        peaks = {row.system: row.peak_bytes / 2**20 for row in of_step if row.mode == "compiled" and row.peak_bytes}
        if first.phase == "train" and {"torch_sequence", "iris_sequence"} <= peaks.keys():
            theirs = peaks["torch_sequence"]
            cells = [f"{theirs:,.0f}", judged(peaks["iris_sequence"], ",.0f", most=theirs)]
            lines.append([machine_of(first).title, model_name(first), step_name(first), *cells])
    return table(["GPUs", "model", "step", "`torch_sequence`, the aim", "`iris_sequence`"], lines)


def choice() -> str:
    """Return what `auto` took in its own runs, of layers that tuned nothing, and the errors of the model today."""
    rows_of = ((machine, predicted(machine)) for machine in several())
    return _choices((machine, machine.title, rows[rows.shape_set == HELD_OUT]) for machine, rows in rows_of)


def choice_in_fp8() -> str:
    """Return the same of all problems in fp8, by the kind of scales."""
    return _choices(
        (machine, f"{machine.title}, {scales}", rows)
        for machine in machines("fp8").values()
        for scales, rows in predicted(machine).groupby("scales", sort=False)
    )


def _choices(of: Iterable[tuple[Machine, str, pd.DataFrame]]) -> str:
    """Return how `auto` did: of each machine, by a title, some of its timed rows, with predictions."""
    lines = []
    for machine, title, rows in of:
        over = auto_over_fastest(rows)
        if over.empty:
            continue
        timed = machine.rows[machine.rows.status == "ok"]
        auto, baseline = (
            timed[timed.variant == name].set_index(frames.PROBLEM).time_us
            for name in (AUTO, timed.family.map(baseline_of))
        )
        over_library = (auto / baseline).reindex(over.index).dropna()
        errors = (rows.predicted_us / rows.time_us - 1).abs()
        cells = [judged(frames.geomean(over), ".3f", most=1.03), judged(float((over <= 1.03).mean()), ".0%", least=0.9)]
        cells += [judged(over.max(), most=1.10), judged(over_library.max(), most=1.02)]
        cells += [
            judged(float(errors.median()), ".1%", most=0.06),
            judged(float(errors.quantile(0.9)), ".1%", most=0.15),
        ]
        lines.append([title, str(len(over)), *cells])
    header = ["GPUs", "problems", "over the fastest: mean, aim 1.03", "within 3 %, aim 90 %", "most, aim 1.10"]
    header += ["over NCCL + cuBLAS: most, aim 1.02", "error of predictions: median, aim 6 %"]
    return table([*header, "90 %, aim 15 %"], lines)


def _by_family(
    world_size: int, kept: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows
) -> Iterator[tuple[Machine, str, pd.DataFrame]]:
    """Yield the fastest variants on each kind of so many GPUs, by family, of the problems that are kept, if any."""
    for machine in several():
        if machine.world_size == world_size:
            best = kept(in_time(machine))
            for family in FAMILIES:
                rows = best[best.family == family]
                if not rows.empty:
                    yield machine, family, rows


def few_rows() -> str:
    """Return the fastest variant over NCCL + cuBLAS on two GPUs by M, and of how many problems that is."""
    lines = []
    for machine, family, rows in _by_family(2):
        over = rows.library / rows.time_us
        at = [over[rows.m.between(low, high)] for low, high in ((1, 64), (256, 1024), (128, 1 << 30))]
        cells = [judged(frames.geomean(at[0]), least=1.15), judged(frames.geomean(at[1]), least=1.10)]
        cells += [judged(at[2].min(), least=0.98)]
        counted = [f"{cell} ({len(one)})" for cell, one in zip(cells, at, strict=True)]
        lines.append([machine.title, SHORT[family], *counted])
    header = ["GPUs", "family", "M ≤ 64: mean, aim 1.15", "M = 256 to 1024: mean, aim 1.10"]
    return table([*header, "M ≥ 128: lowest, aim 0.98"], lines)


def fp8() -> str:
    """Return fp8 products by the kind of their scales: over `_scaled_mm` and NCCL, and over torch's fused operators."""
    lines = []
    for machine in machines("fp8").values():
        rows = machine.best.assign(alone=times_of(machine, GEMM_ALONE))
        for (family, scales), at in rows.groupby(["family", "scales"], sort=False):
            many, few = at[at.m >= _MANY], at[at.m <= _FEW]
            over, theirs = frames.geomean(many.library / many.time_us), (many.async_tp / many.time_us).dropna()
            aim = _FP8.get(str(family))
            cells = [f"{aim:.2f}" if aim else "", judged(over, least=aim) if aim else f"{over:.2f}"]
            cells += [f"{frames.geomean(many.library / many.alone):.2f}"]
            cells += [judged(frames.geomean(theirs), least=1.10), judged(theirs.min(), least=1.0)]
            cells += [_or_empty((many.async_tp / many.alone).dropna())]
            cells += [judged((few.library / few.time_us).min(), least=1.0)]
            lines.append([machine.title, SHORT[str(family)], f"{scales} ({len(many)})", *cells])
    header = ["GPUs", "family", "scales", "aim", "over `_scaled_mm` + NCCL", "most: those over `_scaled_mm` alone"]
    header += ["over torch's fused: mean, aim 1.10", "lowest, aim 1.00", "most: those over `_scaled_mm` alone"]
    return table([*header, "M ≤ 512: lowest over `_scaled_mm` + NCCL, aim 1.00"], lines)


def _or_empty(ratios: pd.Series) -> str:
    return f"{frames.geomean(ratios):.2f}" if len(ratios) else ""


def norms() -> str:
    """Return GEMM + all-reduce + residual + RMSNorm at M ≤ 512: over the library, and over `auto` and a kernel.

    Calls back to back that took twice as long as one alone were held up by something else, and are left out.
    """
    found: dict[tuple[str, str], dict[tuple[int, int, int], dict[str, float]]] = {}
    by_problem = by_machine(NormRecord, lambda row: (row.m, row.n, row.k, row.family, row.mode, row.normed_dtype))
    for machine, rows in by_problem.items():
        for row in rows:
            in_step = row.status == "ok" and (row.time_us or math.inf) <= 2 * (row.latency_us or math.inf)
            if row.family == "gemm_all_reduce" and row.m <= _FEW and row.time_us and in_step:
                of_problem = found.setdefault((machine.title, row.mode), {}).setdefault((row.m, row.n, row.k), {})
                of_problem[row.way] = row.time_us
    lines = []
    for names, of in found.items():
        over = {key: one["library"] / one["fused"] for key, one in of.items() if {"library", "fused"} <= one.keys()}
        apart = [one["unfused"] / one["fused"] for one in of.values() if {"unfused", "fused"} <= one.keys()]
        if not (over and apart):
            continue
        least = min(over, key=lambda key: over[key])
        cells = [str(len(over)), f"{frames.geomean(list(over.values())):.2f}", judged(over[least], least=1.15)]
        lines.append([*names, *cells, sizes(*least), f"{min(apart):.2f} to {max(apart):.2f}"])
    header = ["GPUs", "mode", "problems", "over cuBLAS, NCCL, a kernel: mean", "lowest, aim 1.15", "that is"]
    return table([*header, "over `auto`, a kernel"], lines)


def efficiency_of_four() -> str:
    """Return overlap efficiency on four GPUs at M ≥ 4096, and the speedup over NCCL + cuBLAS at M ≤ 512."""
    lines = []
    for machine, family, rows in _by_family(4):
        many, few = on_16_bytes(rows[rows.m >= _MANY]), rows[rows.m <= _FEW]
        of_sets = many[many.shape_set.isin(_SETS) & (many[["m", "n", "k"]] != _MANY).any(axis=1)].overlap_efficiency
        cells = [judged(frames.geomean(of_sets), least=0.92), judged(of_sets.min(), least=0.80)]
        cells += [f"{_or_empty(many.overlap_efficiency)} ({len(many)})"]
        cells += [f"{judged(frames.geomean(few.library / few.time_us), least=1.3)} ({len(few)})"]
        lines.append([machine.title, SHORT[family], *cells])
    header = ["GPUs", "family", "efficiency: mean, aim 0.92", "lowest, aim 0.80", "of all problems of M ≥ 4096: mean"]
    return table([*header, "M ≤ 512 over NCCL + cuBLAS: mean, aim 1.30"], lines)


def speedups_of_four() -> str:
    """Return speedups on four GPUs at M ≥ 4096, over the library and over the best other project's operator."""
    lines = []
    for machine, family, rows in _by_family(4, on_16_bytes):
        many = rows[(rows.m >= _MANY) & rows.shape_set.isin(_SETS)]
        over = rows.library / rows.time_us
        top, highest = next(iter(frames.rows_of(rows[over == over.max()]))), over.max()
        theirs = many[list(OTHERS)].min(axis=1)
        of_theirs = (theirs / many.time_us).dropna()
        cells = [_or_empty(many.library / many.time_us)]
        cells += [f"{highest:.2f}" if family == "gemm_all_reduce" else judged(highest, least=1.79)]
        cells += [sizes(top.m, top.n, top.k), judged(frames.geomean(of_theirs), least=1.10)]
        cells += [judged(of_theirs.min(), least=1.0), _or_empty((theirs / many.ideal_us).dropna())]
        lines.append([machine.title, SHORT[family], *cells])
    header = ["GPUs", "family", "over NCCL + cuBLAS: mean", "highest of all M, aim 1.79", "that is"]
    header += ["over the best other project: mean, aim 1.10", "lowest, aim 1.00"]
    return table([*header, "most: the best other project over ideal"], lines)


def steps_of_four() -> str:
    """Return Llama-3-70B's steps on four GPUs, each system in its fastest mode."""
    lines = []
    for of_step in decoder_steps():
        first = of_step[0]
        aim = _STEPS_OF_FOUR.get((first.phase, first.batch, first.sequence))
        if aim and (first.model, first.dtype, first.world_size) == ("llama-3-70b", "bf16", 4):
            ours, torchs, limit = (best(of_step, systems) for systems in (IRIS, TORCH, (LIMIT,)))
            cells = [f"{aim:.2f}", judged(_ratio(torchs, ours), least=aim), f"{_ratio(torchs, limit):.2f}"]
            lines.append([machine_of(first).title, step_name(first), *cells])
    return table(["GPUs", "step", "aim", "over torch's best", "most that can be gained"], lines)
