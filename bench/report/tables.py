"""The tables of times that the documentation shows, beside those of the report's questions (questions.py)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from typing import Any

import pandas as pd

from iris_kernels.common.choice.auto import NAME as AUTO
from overlap_taxonomy import current_name

from ..benchmarks.ccl.record import CclRecord
from ..benchmarks.decoder.show import best, between_rounds, host_mark, model_name, range_of, step_name
from ..benchmarks.decoder.systems import IRIS, LIMIT, SYSTEMS, TORCH
from ..benchmarks.host.record import HostRecord
from ..benchmarks.host.ways import KINDS as KINDS_OF_CALL
from ..benchmarks.host.ways import WAYS, name_of
from ..benchmarks.layers.record import LayersRecord
from ..benchmarks.layers.subjects import ALONE, SUBJECTS
from ..benchmarks.links.rank import KINDS
from ..benchmarks.norm.others import OTHERS as FUSIONS
from ..benchmarks.norm.record import NormRecord
from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import layer_name
from ..records import frames
from ..records.record import COMMUNICATION_ALONE, GEMM_ALONE, LIBRARY, Record
from .evidence import (
    FAMILIES,
    OTHERS,
    RESULTS,
    Machine,
    decoder_steps,
    in_one_folder,
    is_timed,
    links,
    machine_of,
    newest,
    of_ours,
    read_all,
    short_name,
    small,
    sweeps,
)
from .markdown import SHORT, ms, table, times, us, with_speedup

_PEAK_GBPS = {"H100": 450.0, "H200": 450.0}  # NVLink 4 of an SXM module, one direction: data sheets
_MOVES = ("store", "load", "copy", "all_store", "all_load", "all_copy")  # those of `KINDS` that move many bytes
_M_GROUPS = ((1, 8), (32, 64), (128,), (256, 512))
_BEYOND = "`auto`, beyond the variant that it took"


def layers_at(machine: Machine, m: int) -> str:
    """Return a row per layer at so many rows: times in µs, in brackets the speedup over NCCL + cuBLAS."""
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

    The most that can be gained is torch's best over the limit: no communication at all. Times with a † are partly the
    host's. Between rounds: torch's shortest over our longest, and the other way.
    """
    lines = []
    for rows in decoder_steps():
        first = rows[0]
        fastest = {system: best(rows, (system,)) for system in SYSTEMS}
        ours, torchs, limit = (best(rows, systems) for systems in (IRIS, TORCH, (LIMIT,)))
        most = torchs.time_us / limit.time_us if torchs and limit and torchs.time_us and limit.time_us else None
        ratios = (ours.speedup_vs_torch, most, ours.limit_over_time) if ours else (None, most, None)
        spent = (ms(row.time_us) + host_mark(row) if row else "" for row in fastest.values())
        over, *shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        spread = range_of(between_rounds(torchs, ours))
        lines.append([_gpus(first), model_name(first), step_name(first), *spent, over, spread, *shown])
    header = ["GPUs", "model", "step", *(f"`{system}`" for system in SYSTEMS), "over torch's best", "between rounds"]
    return table([*header, "most that can be gained", "limit over ours"], lines)


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
        rows = of_file[(of_file.status == "ok") & of_ours(of_file)]
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

    The last columns are the speedup over other projects' fusions.
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
        others = [times((spent.get(name) or math.nan) / fused) for name in FUSIONS]
        lines.append([*cells, with_speedup(fused, library), times(unfused / fused), *others])
    header = ["GPUs", "M, N, K", "family", "mode", "cuBLAS, NCCL, a kernel", "`auto`, a kernel", "fused"]
    return table([*header, "over the one before", *(f"over `{name}`" for name in FUSIONS)], lines)


def _gpus(row: Any) -> str:
    """Return the GPUs that a row was measured on, in words."""
    return f"{row.world_size} × {short_name(row.device_name)}"


def host(machine: Machine) -> str:
    """Return what a call costs the host, µs: median, lowest and highest over all problems; `torch.mm` first.

    The last row is what `auto` takes beyond the variant that it took, in the same problem of the same run.
    """
    rows = machine.rows[machine.rows.host_us.notna() & (machine.rows.status == "ok")]
    rows = rows[rows.variant != COMMUNICATION_ALONE]
    found = rows.groupby(["family", "variant"], sort=False).host_us.agg(["median", "min", "max"]).reset_index()
    cells = {
        (at.family, at.variant): f"{at.median:,.0f} ({at.min:,.0f} to {at.max:,.0f})" for at in frames.rows_of(found)
    }
    beyond = _beyond_what_it_took(rows)
    cells |= {(family, _BEYOND): f"{more.median():+.1f} ({len(more)} problems)" for family, more in beyond.items()}
    names = {GEMM_ALONE: "`torch.mm`, for comparison", _BEYOND: _BEYOND}
    variants = dict.fromkeys([GEMM_ALONE, *found.variant, _BEYOND])
    lines = [
        [names.get(name, f"`{name}`"), *(cells.get((family, name), "") for family in FAMILIES)] for name in variants
    ]
    return table(["variant", *(SHORT[family] for family in FAMILIES)], lines)


def _beyond_what_it_took(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return by family the host's time of `auto` less that of the variant that it took, µs, problem by problem."""
    at = [*frames.PROBLEM, "folder"]
    by_auto = rows[rows.variant == AUTO]
    taken = by_auto.config.str.extract(rf"^{AUTO}: (\S+)")[0]
    by_auto = by_auto.assign(taken=[current_name(*pair) for pair in zip(by_auto.family, taken, strict=True)])
    both = by_auto.merge(rows, left_on=[*at, "taken"], right_on=[*at, "variant"], suffixes=("", "_taken"))
    more = both.host_us - both.host_us_taken
    return {str(family): more[group.index] for family, group in both.groupby("family")}


def host_calls() -> str:
    """Return what a call takes the host, µs, by layer of software and kind of call: a table per machine, its newest."""
    files = sorted(read_all(HostRecord).items(), key=lambda item: max(row.timestamp for row in item[1]))
    newest_of = {machine_of(rows[0]): (path, rows) for path, rows in files if rows[0].device == "cuda"}
    parts = []
    for machine, (path, rows) in newest_of.items():
        config_of = {_product(row): row.config for row in rows if row.config}
        times_of: dict[str, dict[tuple[str, str], str]] = {}
        for row in rows:
            if row.median_us and row.lowest_us and row.p90_us:
                cell = f"{us(row.median_us)} ({us(row.lowest_us)} to {us(row.p90_us)})"
                called = _called(row, config_of.get(_product(row), ""))
                times_of.setdefault(called, {})[row.way, row.kind] = cell
        lines = [
            [name_of(way, kind), *(of.get((way, kind), "") for of in times_of.values())]
            for kind in KINDS_OF_CALL
            for way in WAYS
        ]
        link = f"[rows](../../results/{path.relative_to(RESULTS).as_posix()})"
        at = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row.commit for row in rows))
        shown = table(["call", *times_of], [line for line in lines if any(line[1:])])
        parts.append(f"{machine.title} ({link}, at {at}):\n\n{shown}")
    return "\n\n".join(parts)


def _product(row: HostRecord) -> tuple[Any, ...]:
    return row.family, row.m, row.n, row.k, row.variant


def _called(row: HostRecord, config: str) -> str:
    """Return what was called, in words: of `auto`, what it took."""
    taken = re.match(rf"{AUTO}: (\S+)", config)
    chosen = f"`{AUTO}`: `{taken[1]}`" if taken else f"`{row.variant}`"
    return f"{SHORT[row.family]} {row.m}, {row.n}, {row.k}, {chosen}"
