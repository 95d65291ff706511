"""The tables of times that the documentation shows, beside those of the report's questions (questions.py)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import pandas as pd

from iris_kernels.common.choice.auto import NAME as AUTO

from ..benchmarks.ccl.record import CclRecord
from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.decoder.show import best, step_name
from ..benchmarks.decoder.systems import IRIS, LIMIT, SYSTEMS, TORCH
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
    csvs,
    in_one_folder,
    is_timed,
    links,
    newest,
    of_ours,
    read_all,
    short_name,
    small,
    sweeps,
)
from .markdown import SHORT, table, times, us, with_speedup

_PEAK_GBPS = {"H100": 450.0, "H200": 450.0}  # NVLink 4 of an SXM module, one direction: data sheets
_MOVES = ("store", "load", "copy", "all_store", "all_load", "all_copy")  # those of `KINDS` that move many bytes
_M_GROUPS = ((1, 8), (32, 64), (128,), (256, 512))
_HOST_CALLS = "host-calls.csv"
_CALLS = {  # of its rows, in which words they are shown
    "torch.mm(out=), for comparison": "`torch.mm(out=)`, for comparison",
    "prepared call (operator.call, m given)": "operator, prepared",
    "function": "function, such as `gemm_reduce_scatter`",
    "torch op, eager": "torch op, eager",
    "op inside a compiled graph (10 less 2 ops, over 8)": "torch op, in a compiled graph",
    "layer, eager": "layer, eager",
    "operator, first call of a new M": "operator, first call of another M",
    "torch op, first call of a new M": "torch op, first call of another M",
    "layer, first call of a new M": "layer, first call of another M",
}


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
    """Return steps of a decoder, ms: each system in its fastest mode, and ours beside torch's best and the limit.

    The most that can be gained is torch's best over the limit: no communication at all.
    """
    lines = []
    for rows in newest(DecoderRecord, lambda row: (row.device_name, row.dtype, *row.step_key)).values():
        first = rows[0]
        fastest = {system: best(rows, (system,)) for system in SYSTEMS}
        ours, torchs, limit = (best(rows, systems) for systems in (IRIS, TORCH, (LIMIT,)))
        most = torchs.time_us / limit.time_us if torchs and limit and torchs.time_us and limit.time_us else None
        ratios = (ours.speedup_vs_torch, most, ours.limit_over_time) if ours else (None, most, None)
        spent = ("" if row is None or not row.time_us else f"{row.time_us / 1e3:.2f}" for row in fastest.values())
        model_of = f"{first.model}, {first.layers} layers, {first.dtype}"
        shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append([_gpus(first), model_of, step_name(first), *spent, *shown])
    systems = [f"`{system}`" for system in SYSTEMS]
    return table(
        ["GPUs", "model", "step", *systems, "over torch's best", "most that can be gained", "limit over ours"], lines
    )


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


def host_calls() -> str:
    """Return what one call costs the host, µs, by the layer of software at which it begins; of the newest file."""
    newest_file = max((path for path in csvs() if path.name == _HOST_CALLS), key=lambda path: path.parent.name)
    rows = pd.read_csv(newest_file).set_index("what")
    lines = [
        [label, us(rows.median_us[what]), us(rows.min_us[what]), us(rows.p90_us[what])]
        for what, label in _CALLS.items()
    ]
    return table(["call", "median", "lowest", "90 %"], lines)
