"""The tables of times that the documentation shows, beside those of the report's questions (questions.py)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from iris_kernels.common.choice.auto import NAME as AUTO
from overlap_taxonomy import Agent, list_variants

from ..benchmarks.ccl.record import CclRecord
from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.decoder.show import best, step_name
from ..benchmarks.decoder.systems import IRIS, SYSTEMS
from ..benchmarks.layers.record import LayersRecord
from ..benchmarks.layers.subjects import ALONE, SUBJECTS
from ..benchmarks.links.rank import KINDS
from ..benchmarks.norm.record import NormRecord
from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import layer_name
from ..records import frames
from ..records.record import LIBRARY, Record
from .evidence import (
    FAMILIES,
    OTHERS,
    Machine,
    in_one_folder,
    is_timed,
    large,
    links,
    machines,
    newest,
    of_ours,
    read_all,
    short_name,
    small,
    sweeps,
)
from .markdown import SHORT, mean_and_lowest, sizes, table, times, us, with_speedup

PAPER_BASELINE = "library_list"  # torch.mm, then an all-gather into a list of column slices
_PEAK_GBPS = {"H100": 450.0, "H200": 450.0}  # NVLink 4 of an SXM module, one direction: data sheets
_MOVES = ("store", "load", "copy", "all_store", "all_load", "all_copy")  # those of `KINDS` that move many bytes
_M_GROUPS = ((1, 8), (32, 64), (128,), (256, 512))


def layers_at(machine: Machine, m: int) -> str:
    """Return a row a layer at so many rows: times in µs, in brackets the speedup over NCCL + cuBLAS."""
    at_m = machine.best[(machine.best.m == m) & (machine.best.shape_set != "ragged")]
    rows = []
    for family in FAMILIES:
        for row in frames.rows_of(at_m[at_m.family == family]):
            layer = layer_name(OF_BENCH[family].collective, row.n, row.k)
            if layer is None:
                continue
            cell = _time_alone if row.held_up else with_speedup
            others = [cell(getattr(row, name), row.library) for name in OTHERS]
            ours = cell(row.time_us, row.library)
            fastest = all(pd.isna(getattr(row, name)) or row.time_us <= getattr(row, name) for name in OTHERS)
            ours = f"**{ours}**" if fastest and row.time_us < row.library else ours
            timed = [us(row.library), *others, ours, f"`{row.variant}`", us(row.ideal_us)]
            rows.append([SHORT[family], layer, f"{row.m}, {row.n}, {row.k}", *timed])
    header = ["family", "layer", "M, N, K", "NCCL + cuBLAS", *(f"`{name}`" for name in OTHERS)]
    return table([*header, "iris-overlap", "variant", "ideal"], rows)


def _time_alone(time_us: float, library_us: float) -> str:
    return f"{us(time_us)}; the host was late with the calls of NCCL + cuBLAS" if pd.notna(time_us) else ""


def model(machine: Machine, name: str) -> str:
    """Return a row a layer of a model, for large and small M."""
    at_m = {m: machine.best[(machine.best.m == m) & ~machine.best.held_up] for m in (8192, 64)}
    lines = []
    for family in FAMILIES:
        there = machine.best[(machine.best.family == family) & machine.best.m.isin(at_m)].drop_duplicates(["n", "k"])
        for one in frames.rows_of(there):
            layer = layer_name(OF_BENCH[family].collective, one.n, one.k) or ""
            if layer.partition(" ")[0] != name:
                continue
            cells = [SHORT[family], layer, f"{one.n}, {one.k}"]
            for m, others in ((8192, OTHERS), (64, ())):
                rows = at_m[m]
                (row,) = frames.rows_of(rows[(rows.family == family) & (rows.n == one.n) & (rows.k == one.k)]) or [None]
                cells.append(us(row.library) if row else "")
                cells += [with_speedup(getattr(row, of), row.library) if row else "" for of in (*others, "time_us")]
            lines.append(cells)
    header = ["", "layer", "N, K", "M = 8192: NCCL + cuBLAS", *(f"`{other}`" for other in OTHERS), "iris-overlap"]
    return table([*header, "M = 64: NCCL + cuBLAS", "iris-overlap"], lines)


def summary(machine: Machine) -> str:
    """Return what the fastest variant of each problem reaches, by family."""
    at = {family: machine.best[machine.best.family == family] for family in FAMILIES}
    many, few = ({family: pick(best) for family, best in at.items()} for pick in (large, small))

    def row(label: str, of: dict[str, pd.DataFrame], cell: Callable[[pd.DataFrame], str]) -> list[str]:
        return [label, *(cell(of[family]) if len(of[family]) else "" for family in FAMILIES)]

    def over(name: str) -> Callable[[pd.DataFrame], str]:
        return lambda best: mean_and_lowest(best[name] / best.time_us)

    rows = [
        row("M ≥ 1024: problems", many, lambda best: str(len(best))),
        row(
            "overlap efficiency: mean, lowest",
            many,
            lambda best: "{:.2f}, {:.2f}".format(*_mean_and_least(best.overlap_efficiency.dropna())),
        ),
        row("over NCCL + cuBLAS: mean, lowest", many, over("library")),
        row("highest", many, lambda best: times((best.library / best.time_us).max())),
        *(row(f"over `{name}`: mean, lowest", many, over(name)) for name in OTHERS),
        row("M ≤ 512: problems", few, lambda best: str(len(best))),
        row("over NCCL + cuBLAS: mean, lowest", few, over("library")),
        row("slower than NCCL + cuBLAS", few, lambda best: str(int((best.time_us > best.library).sum()))),
    ]
    return table(["", *(SHORT[family] for family in FAMILIES)], [cells for cells in rows if any(cells[1:])])


def _mean_and_least(values: pd.Series[float]) -> tuple[float, float]:
    return frames.geomean(values), float(values.min())


def small_m(machine: Machine) -> str:
    """Return the mean speedup over NCCL + cuBLAS by M; in brackets the bound: the GEMM alone."""
    layers = small(machine.best)
    rows = []
    for group in _M_GROUPS:
        cells = [", ".join(map(str, group))]
        for family in FAMILIES:
            at = layers[(layers.family == family) & layers.m.isin(group)]
            bound = times(frames.geomean(at.library / at.ideal_us))
            cells.append(f"{times(frames.geomean(at.library / at.time_us))} ({bound})" if len(at) else "")
        rows.append(cells)
    return table(["M", *(SHORT[family] for family in FAMILIES)], rows)


def losses(*shown: Machine) -> str:
    """Return how often the fastest variant is slower than NCCL + cuBLAS, and where it is slowest."""
    rows = []
    for machine in shown:
        for family in FAMILIES:
            timed = machine.best[(machine.best.family == family) & ~machine.best.held_up]
            for label, at in (("M > 512", timed[timed.m > 512]), ("M ≤ 512", timed[timed.m <= 512])):
                slower = int((at.time_us > at.library).sum())
                if not slower:
                    continue
                worst = frames.rows_of(at.sort_values("speedup_vs_library"))[0]
                layer = layer_name(OF_BENCH[family].collective, worst.n, worst.k)
                where = sizes(worst.m, worst.n, worst.k) + (f" ({layer})" if layer else "")
                counts = [f"{slower} of {len(at)}", times(worst.speedup_vs_library), where, worst.timestamp[:10]]
                rows.append([machine.title, SHORT[family], label, *counts])
    return table(["GPUs", "family", "rows", "slower in", "slowest", "at M × N × K", "measured"], rows)


def layers() -> str:
    """Return the speedup of a pair of layers over torch's tensor-parallel styles."""
    found = newest(LayersRecord, lambda row: (row.device_name, *row.pair_key, row.phase))
    timed = {name for rows in found.values() for name in (row.subject for row in rows if row.speedup_vs_torch)}
    shown = [name for name in SUBJECTS if name in timed and name not in ("torch", ALONE)]
    lines = []
    for rows in found.values():
        of = {row.subject: row for row in rows}
        speedups = (of[name].speedup_vs_torch if name in of else None for name in (*shown, ALONE))
        first = rows[0]
        pair = f"{first.tokens}, {first.width}, {first.features}"
        torch_us = us(of["torch"].time_us or math.nan)
        cells = [times(math.nan if speedup is None else speedup) for speedup in speedups]
        lines.append([_gpus(first), f"{first.layout}, {first.phase}", pair, torch_us, *cells])
    header = ["GPUs", "layout, phase", "tokens, width, features", "torch, µs", *(f"`{name}`" for name in shown)]
    return table([*header, "no communication"], lines)


def decoder() -> str:
    """Return steps of a decoder, ms: each system in its fastest mode, and ours beside torch's best and the limit."""
    lines = []
    for rows in newest(DecoderRecord, lambda row: (row.device_name, row.dtype, *row.step_key)).values():
        first = rows[0]
        fastest = {system: best(rows, (system,)) for system in SYSTEMS}
        ours = best(rows, IRIS)
        ratios = (ours.speedup_vs_torch, ours.limit_over_time) if ours else (None, None)
        spent = ("" if row is None or not row.time_us else f"{row.time_us / 1e3:.2f}" for row in fastest.values())
        model_of = f"{first.model}, {first.layers} layers, {first.dtype}"
        shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append([_gpus(first), model_of, step_name(first), *spent, *shown])
    systems = [f"`{system}`" for system in SYSTEMS]
    return table(["GPUs", "model", "step", *systems, "over torch's best", "limit over ours"], lines)


def link_rates() -> str:
    """Return what the links and flags take, the median over pairs of ranks, of the largest size measured."""
    found = links()
    rows = []
    for kind, meaning in KINDS.items():
        cells = []
        for records in found.values():
            at = [row for row in records if row.kind == kind and row.time_us]
            largest = [row for row in at if row.bytes == max(row.bytes for row in at)]
            rate = _median(row.gbps for row in largest)
            spent = _median(row.time_us for row in largest)
            cells.append(f"{rate:,.0f} GB/s" if rate else f"{spent:,.1f} µs" if spent else "")
        rows.append([f"`{kind}`", meaning, *cells])
    return table(["", "", *(machine.title for machine in found)], rows)


def link_sizes() -> str:
    """Return the rate of each way to move bytes by size, GB/s, and in brackets the part of the links' peak."""
    lines = []
    for machine, records in links().items():
        peak = _PEAK_GBPS.get(machine.gpu)
        for size in sorted({row.bytes for row in records if row.gbps}):
            cells = []
            for kind in _MOVES:
                rate = _median(row.gbps for row in records if (row.kind, row.bytes) == (kind, size))
                cells.append(f"{rate:,.0f}" + (f" ({rate / peak:.0%})" if peak else "") if rate else "")
            lines.append([machine.title, f"{size / 1024:,.0f}", *cells])
    return table(["GPUs", "KiB a rank", *(f"`{kind}`" for kind in _MOVES)], lines)


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of those that there are; None of nothing."""
    return statistics.median(there) if (there := [value for value in values if value is not None]) else None


def collectives() -> str:
    """Return collectives on whole tensors, µs, with the speedup over NCCL."""
    found = newest(CclRecord, lambda row: (row.device_name, row.world_size, row.kind, row.bytes, row.mode, row.library))
    spent = {
        key: row.time_us
        for key, rows in found.items()
        for row in rows
        if row.status == "ok" and row.variant in ("", "auto") and row.device == "cuda"
    }
    lines = []
    for gpu, world_size, kind, size in sorted({key[:4] for key in spent}):
        cells = [f"{world_size} × {short_name(gpu)}", kind, f"{size >> 10:,}"]
        for mode in ("eager", "graph"):
            ours, nccl = (
                spent.get((gpu, world_size, kind, size, mode, library)) or math.nan for library in ("iris", "nccl")
            )
            cells += [us(nccl), with_speedup(ours, nccl)]
        lines.append(cells)
    header = ["GPUs", "collective", "KiB", "NCCL, eager", "`ctx.ccl`, eager", "NCCL, in a graph"]
    return table([*header, "`ctx.ccl`, in a graph"], lines)


def epilogue() -> str:
    """Return what an epilogue adds to a call, µs: each family's fastest variant with it and without, last measured."""
    files = [rows for rows in map(frames.to_frame, read_all(Record).values()) if rows.epilogue.any()]
    last = {_gpus(rows.iloc[0]): rows for rows in sorted(files, key=lambda rows: str(rows.timestamp.max()))}
    keys = ["m", "n", "k", "family", "variant"]
    lines = []
    for gpus, of_file in sorted(last.items()):
        rows = frames.variants_only(of_file)
        rows = rows[(rows.status == "ok") & (rows.variant != LIBRARY)]
        spent = {str(ops): at.set_index(keys).time_us for ops, at in rows.groupby("epilogue", sort=False)}
        plain = spent.pop("")
        for key in plain.groupby(keys[:-1]).idxmin():
            m, n, k, family, variant = key
            for ops, with_ops in spent.items():
                before, after = plain[key], with_ops.get(key, math.nan)
                more = f"{after - before:+.1f} ({after / before - 1:+.1%})"
                cells = [gpus, f"{m}, {n}, {k}", SHORT[family], f"`{variant}`", us(before), f"`{ops}`", us(after), more]
                lines.append(cells)
    return table(["GPUs", "M, N, K", "family", "variant", "without", "epilogue", "with it", "more"], lines)


def fp8() -> str:
    """Return fp8 products, µs, by the kind of their scales: the fastest variant beside the library and torch's own."""
    rows = sweeps()
    rows = rows[rows.dtype == "fp8"]
    rows = in_one_folder(rows, of_ours(rows) & is_timed(rows))
    keys = ["world_size", "device_name", "scales", "m", "n", "k", "family"]
    lines = []
    for _, at in rows[is_timed(rows)].groupby(keys):
        first = next(iter(frames.rows_of(at)))
        spent = at.set_index("variant").time_us
        ours = at[of_ours(at)].set_index("variant").time_us
        library, best = spent.get(LIBRARY, math.nan), ours.min()
        cells = [_gpus(first), f"{first.m}, {first.n}, {first.k}"]
        cells += [SHORT[first.family], first.scales, us(library), us(spent.get("async_tp", math.nan))]
        cells += [with_speedup(best, library), f"`{ours.idxmin()}`"]
        lines.append(cells)
    header = ["GPUs", "M, N, K", "family", "scales", "`library`", "`async_tp`", "best here", "which"]
    return table(header, lines)


def two_hosts() -> str:
    """Return products over simulated hosts, µs: what `auto` takes beside NCCL + cuBLAS over all ranks."""
    rows = sweeps()
    rows = rows[rows.device_name.str.endswith(" hosts") & (rows.status == "ok")]
    rows = in_one_folder(rows, rows.variant == AUTO)
    lines = []
    for _, at in rows.groupby(["world_size", "device_name", "m", "n", "k", "family"]):
        spent, chosen = at.set_index("variant").time_us, next(iter(frames.rows_of(at[at.variant == AUTO])))
        library = spent.get("library_layout", spent[LIBRARY])  # which gives C as one matrix, as all-scatter does
        cells = [_gpus(chosen), f"{chosen.m}, {chosen.n}, {chosen.k}", SHORT[chosen.family], us(spent["gemm_alone"])]
        lines.append([*cells, us(library), with_speedup(spent[AUTO], library), f"`{chosen.config}`"])
    return table(["GPUs", "M, N, K", "family", "GEMM alone", "`library`", "`auto`", "which takes"], lines)


def norms() -> str:
    """Return GEMM + collective + residual + RMSNorm, µs: fused, as `auto` chooses, beside one more kernel.

    Calls back to back that took twice as long as one alone were held up by something else, and are left out.
    """

    def key(row: NormRecord) -> tuple[int, str, int, int, int, str, str, str]:
        return (row.world_size, row.device_name, row.m, row.n, row.k, row.family, row.mode, row.normed_dtype)

    lines = []
    for _, rows in sorted(newest(NormRecord, key).items(), key=lambda item: item[0]):
        first = rows[0]
        timed = [row for row in rows if row.status == "ok" and row.variant in ("", AUTO)]
        spent = {row.way: row.time_us for row in timed if (row.time_us or 0.0) <= 2 * (row.latency_us or math.inf)}
        library, unfused, fused = (spent.get(way) or math.nan for way in ("library", "unfused", "fused"))
        cells = [_gpus(first), f"{first.m}, {first.n}, {first.k}", SHORT[first.family], first.mode]
        cells += [us(library), with_speedup(unfused, library)]
        lines.append([*cells, with_speedup(fused, library), times(unfused / fused)])
    header = ["GPUs", "M, N, K", "family", "mode", "cuBLAS, NCCL, a kernel", "`auto`, a kernel", "fused"]
    return table([*header, "over the one before"], lines)


def _gpus(row: Any) -> str:
    """Return the GPUs that a row was measured on, in words."""
    return f"{row.world_size} × {short_name(row.device_name)}"


def host(machine: Machine) -> str:
    """Return what a call costs the host, µs: median, lowest and highest over all problems."""
    rows = frames.variants_only(machine.rows)
    rows = rows[rows.host_us.notna() & (rows.status == "ok")]
    found = rows.groupby(["family", "variant"], sort=False).host_us.agg(["median", "min", "max"]).reset_index()
    cells = {
        (at.family, at.variant): f"{at.median:,.0f} ({at.min:,.0f} to {at.max:,.0f})" for at in frames.rows_of(found)
    }
    variants = dict.fromkeys(found.variant)
    lines = [[f"`{variant}`", *(cells.get((family, variant), "") for family in FAMILIES)] for variant in variants]
    return table(["variant", *(SHORT[family] for family in FAMILIES)], lines)


def paper_rows(wanted: Callable[[pd.DataFrame], pd.Series]) -> pd.DataFrame:
    """Return the paper's shapes on every machine, each in the last folder that has a wanted row of it."""
    rows = pd.concat([machine.all_rows for machine in machines().values() if machine.world_size > 1])
    rows = rows[(rows.family == "gemm_all_scatter") & (rows.shape_set == "paper")]
    return in_one_folder(rows, is_timed(rows) & wanted(rows))


def paper(machine: str) -> str:
    """Return the paper's shapes, µs: warps that communicate over the paper's baseline and over NCCL + cuBLAS.

    Where the run has no list of column slices, the paper's baseline, an all-gather and a copy stand for it.
    """
    (ours,) = (one.name for one in list_variants("gemm_all_scatter") if one.agent is Agent.COMM_WARPS)
    rows = paper_rows(lambda rows: rows.variant == ours)
    (gpus,) = (one for one in machines().values() if one.name == machine)
    rows = rows[(rows.device_name == gpus.device_name) & (rows.world_size == gpus.world_size)]
    spent = rows.pivot_table(index=["m", "n", "k"], columns="variant", values="time_us").sort_values("library")
    baseline = PAPER_BASELINE if PAPER_BASELINE in spent and spent[PAPER_BASELINE].notna().all() else "library_layout"
    spent = spent.rename(columns={ours: "ours"})
    lines = []
    for row in frames.rows_of(spent.reset_index()):
        compared = getattr(row, baseline), row.library
        cells = [us(at) for at in (*compared, row.ours, row.gemm_alone)]
        lines.append([f"{row.m}, {row.n}, {row.k}", *cells, *(times(at / row.ours) for at in compared)])
    header = ["M, N, K", f"`{baseline}`", "NCCL + cuBLAS", f"`{ours}`", "GEMM alone"]
    return table([*header, f"over `{baseline}`", "over NCCL + cuBLAS"], lines)
