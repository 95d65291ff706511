"""Each table of the documentation that comes from measurements, by the name in its marker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd

from overlap_taxonomy import Agent, list_variants

from ..ccl.record import CclRecord
from ..decoder.record import DecoderRecord
from ..decoder.show import best, by_step, step_name
from ..decoder.systems import IRIS, SYSTEMS
from ..layers.subjects import ALONE, SUBJECTS
from ..links.rank import KINDS
from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import layer_name
from ..records import frames
from ..records.record import read_as
from . import scale_out
from .provenance import files, stress
from .results import FAMILIES, MACHINES, OTHERS, RESULTS, Machine, large, layers, links, small

_SHORT = {
    "gemm_all_scatter": "all-scatter",
    "all_gather_gemm": "all-gather",
    "gemm_reduce_scatter": "reduce-scatter",
    "gemm_all_reduce": "all-reduce",
}
_M_GROUPS = ((1, 8), (32, 64), (128,), (256, 512))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _us(value: float) -> str:
    if pd.isna(value):
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _with_speedup(time_us: float, library_us: float) -> str:
    return "" if pd.isna(time_us) else f"{_us(time_us)} ({library_us / time_us:.2f}×)"


def _time_alone(time_us: float, library_us: float) -> str:
    return f"{_us(time_us)}; the host was late with the calls of NCCL + cuBLAS"


def _problems(machine: Machine, m: int, only_layers: bool) -> str:
    """A row a problem of so many rows: times in µs, in brackets the speedup over NCCL + cuBLAS."""
    best = machine.best[(machine.best.m == m) & (machine.best.shape_set != "ragged")]
    shown = [name for name in OTHERS if best[name].notna().any()]
    rows = []
    for family in FAMILIES:
        for row in frames.rows_of(best[best.family == family]):
            layer = layer_name(OF_BENCH[family].collective, row.n, row.k)
            if only_layers and layer is None:
                continue
            cell = _time_alone if row.held_up else _with_speedup
            others = [cell(getattr(row, name), row.library) for name in shown]
            ours = cell(row.time_us, row.library)
            fastest = all(pd.isna(getattr(row, name)) or row.time_us <= getattr(row, name) for name in shown)
            ours = f"**{ours}**" if fastest and row.time_us < row.library else ours
            sizes = f"{row.m}, {row.n}, {row.k}"
            timed = [_us(row.library), *others, ours, f"`{row.variant}`", _us(row.ideal_us)]
            rows.append([_SHORT[family], layer or "", sizes, *timed])
    header = ["family", "layer", "M, N, K", "NCCL + cuBLAS", *(f"`{name}`" for name in shown)]
    return markdown([*header, "iris-overlap", "variant", "ideal"], rows)


def _model(model: str) -> str:
    """A row a layer of a model on four GPUs, for large and small M."""
    best = MACHINES["h200x4"].best
    timed = {m: best[(best.m == m) & ~best.held_up] for m in (8192, 64)}
    lines = []
    for family in FAMILIES:
        at = best[(best.family == family) & best.m.isin(timed)].drop_duplicates(["n", "k"])
        for one in frames.rows_of(at):
            name = layer_name(OF_BENCH[family].collective, one.n, one.k) or ""
            if name.partition(" ")[0] != model:
                continue
            cells = [_SHORT[family], name, f"{one.n}, {one.k}"]
            for m, others in ((8192, OTHERS), (64, ())):
                rows = timed[m]
                (row,) = frames.rows_of(rows[(rows.family == family) & (rows.n == one.n) & (rows.k == one.k)]) or [None]
                cells.append(_us(row.library) if row else "")
                cells += [_with_speedup(getattr(row, of), row.library) if row else "" for of in (*others, "time_us")]
            lines.append(cells)
    header = ["", "layer", "N, K", "M = 8192: NCCL + cuBLAS", *(f"`{name}`" for name in OTHERS), "iris-overlap"]
    return markdown([*header, "M = 64: NCCL + cuBLAS", "iris-overlap"], lines)


def _over(name: str, best: pd.DataFrame) -> str:
    """Mean and lowest speedup over what another column says."""
    values = (best[name] / best.time_us).dropna()
    return f"{frames.geomean(values):.2f}×, {values.min():.2f}×" if len(values) else ""


def _summary(machine: Machine) -> str:
    """What the fastest variant of each problem reaches, by family."""
    at = {family: machine.best[machine.best.family == family] for family in FAMILIES}
    many, few = ({family: pick(best) for family, best in at.items()} for pick in (large, small))

    def row(label: str, of: dict[str, pd.DataFrame], cell: Callable[[pd.DataFrame], str]) -> list[str]:
        return [label, *(cell(of[family]) if len(of[family]) else "" for family in FAMILIES)]

    rows = [
        row("M ≥ 1024: problems", many, lambda best: str(len(best))),
        row(
            "overlap efficiency: mean, lowest",
            many,
            lambda best: f"{frames.geomean(best.overlap_efficiency):.2f}, {best.overlap_efficiency.min():.2f}",
        ),
        row("over NCCL + cuBLAS: mean, lowest", many, partial(_over, "library")),
        row("highest", many, lambda best: f"{(best.library / best.time_us).max():.2f}×"),
        *(row(f"over `{name}`: mean, lowest", many, partial(_over, name)) for name in OTHERS),
        row("M ≤ 512: problems", few, lambda best: str(len(best))),
        row("over NCCL + cuBLAS: mean, lowest", few, partial(_over, "library")),
        row("slower than NCCL + cuBLAS", few, lambda best: str(int((best.time_us > best.library).sum()))),
    ]
    return markdown(["", *(_SHORT[family] for family in FAMILIES)], [cells for cells in rows if any(cells[1:])])


def _small_m(machine: Machine) -> str:
    """Mean speedup over NCCL + cuBLAS by M; in brackets the bound: the GEMM alone."""
    best = small(machine.best)
    rows = []
    for group in _M_GROUPS:
        cells = [", ".join(map(str, group))]
        for family in FAMILIES:
            at = best[(best.family == family) & best.m.isin(group)]
            bound = frames.geomean(at.library / at.ideal_us)
            cells.append(f"{frames.geomean(at.library / at.time_us):.2f}× ({bound:.2f}×)" if len(at) else "")
        rows.append(cells)
    return markdown(["M", *(_SHORT[family] for family in FAMILIES)], rows)


def _losses(*machines: Machine) -> str:
    """How often the fastest variant is slower than NCCL + cuBLAS, and where it is slowest."""
    rows = []
    for machine in machines:
        for family in FAMILIES:
            best = machine.best[(machine.best.family == family) & ~machine.best.held_up]
            for label, at in (("M ≥ 1024", best[best.m >= 1024]), ("M ≤ 512", best[best.m <= 512])):
                slower = int((at.time_us > at.library).sum())
                if not slower:
                    continue
                worst = frames.rows_of(at.sort_values("speedup_vs_library"))[0]
                layer = layer_name(OF_BENCH[family].collective, worst.n, worst.k)
                where = f"{worst.m} × {worst.n} × {worst.k}" + (f" ({layer})" if layer else "")
                counts = [f"{slower} of {len(at)}", f"{worst.speedup_vs_library:.2f}×", where]
                rows.append([machine.title, _SHORT[family], label, *counts])
    return markdown(["GPUs", "family", "rows", "slower in", "slowest", "at M × N × K"], rows)


def _layers() -> str:
    """Speedup of a pair of layers over torch's tensor-parallel styles."""
    rows = layers("layers-h200x2")
    keys = ["layout", "phase", "tokens", "width", "features"]
    table = rows.pivot_table(index=keys, columns="subject", values="speedup_vs_torch", sort=False)
    torch_us = rows[rows.subject == "torch"].set_index(keys).time_us
    shown = [name for name in SUBJECTS if name in table and name not in ("torch", ALONE)]
    columns = [*shown, ALONE]
    cells = []
    for row in frames.rows_of(table.join(torch_us).reset_index()):
        speedups = ("" if pd.isna(value) else f"{value:.2f}×" for value in (getattr(row, name) for name in columns))
        sizes = f"{row.tokens}, {row.width}, {row.features}"
        cells.append([f"{row.layout}, {row.phase}", sizes, _us(row.time_us), *speedups])
    header = ["layout, phase", "tokens, width, features", "torch, µs", *(f"`{name}`" for name in shown)]
    return markdown([*header, "no communication"], cells)


def _decoder(name: str) -> str:
    """Steps of a decoder, ms: each system in its fastest mode, and ours beside the best of torch's and the limit."""
    lines = []
    for rows in by_step(read_as(RESULTS / f"{name}.csv", DecoderRecord, speak=False)).values():
        fastest = {system: best(rows, (system,)) for system in SYSTEMS}
        ours = best(rows, IRIS)
        ratios = (ours.speedup_vs_torch, ours.limit_over_time) if ours else (None, None)
        times = ("" if row is None or not row.time_us else f"{row.time_us / 1e3:.2f}" for row in fastest.values())
        lines.append([step_name(rows[0]), *times, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    return markdown(["step", *(f"`{system}`" for system in SYSTEMS), "over torch's best", "limit over ours"], lines)


def _links() -> str:
    """What the links and flags take, the median over pairs of ranks."""
    found = {ranks: links(f"h200x{ranks}-links") for ranks in (2, 4)}
    rows = []
    for kind, meaning in KINDS.items():
        cells = []
        for frame in found.values():
            at = frame[frame.kind == kind]
            if at.empty:
                cells.append("")
            else:
                rate = at.gbps.median()
                cells.append(f"{at.time_us.median():,.1f} µs" if pd.isna(rate) else f"{rate:,.0f} GB/s")
        rows.append([f"`{kind}`", meaning, *cells])
    return markdown(["", "", *(f"{ranks} × H200" for ranks in found)], rows)


def _ccl(*names: str) -> str:
    """Collectives on whole tensors, µs, with the speedup over NCCL; of a case in several files the last counts."""
    rows = [row for name in names for row in read_as(RESULTS / f"{name}.csv", CclRecord, speak=False)]
    by_auto = [row for row in rows if row.status == "ok" and row.variant in ("", "auto")]
    times = {(row.kind, row.bytes, row.mode, row.library): row.time_us for row in by_auto}
    lines = []
    for kind, size in sorted({(row.kind, row.bytes) for row in by_auto}):
        cells = [kind, f"{size >> 10:,}"]
        for mode in ("eager", "graph"):
            ours, nccl = (times.get((kind, size, mode, library)) or math.nan for library in ("iris", "nccl"))
            cells += [_us(nccl), _with_speedup(ours, nccl)]
        lines.append(cells)
    header = ["collective", "KiB", "NCCL, eager", "`ctx.ccl`, eager", "NCCL, in a graph", "`ctx.ccl`, in a graph"]
    return markdown(header, lines)


def _epilogue(name: str) -> str:
    """What an epilogue adds to a call, µs: each family's fastest variant with it and without."""
    rows = frames.variants_only(frames.read_frame(RESULTS / f"{name}.csv"))
    rows = rows[(rows.status == "ok") & (rows.variant != "library")]
    keys = ["m", "n", "k", "family", "variant"]
    plain = rows[rows.epilogue.fillna("") == ""].set_index(keys).time_us
    with_ops = rows[rows.epilogue.fillna("") != ""].set_index(keys).time_us
    fastest = plain.groupby(keys[:-1]).idxmin()
    lines = []
    for m, n, k, family, variant in fastest:
        before, after = (times[m, n, k, family, variant] for times in (plain, with_ops))
        more = f"{after - before:+.1f} ({after / before - 1:+.1%})"
        lines.append([f"{m}, {n}, {k}", _SHORT[family], f"`{variant}`", _us(before), _us(after), more])
    ops = next(ops for ops in rows.epilogue.fillna("") if ops)
    return markdown(["M, N, K", "family", "variant", "without", f"with `{ops}`", "more"], lines)


def _host(machine: Machine) -> str:
    """What a call costs the host, µs: median, lowest and highest over all problems."""
    rows = frames.variants_only(machine.rows)
    rows = rows[rows.host_us.notna() & (rows.status == "ok")]
    found = rows.groupby(["family", "variant"], sort=False).host_us.agg(["median", "min", "max"]).reset_index()
    cells = {
        (at.family, at.variant): f"{at.median:,.0f} ({at.min:,.0f} to {at.max:,.0f})" for at in frames.rows_of(found)
    }
    variants = dict.fromkeys(found.variant)
    lines = [[f"`{variant}`", *(cells.get((family, variant), "") for family in FAMILIES)] for variant in variants]
    return markdown(["variant", *(_SHORT[family] for family in FAMILIES)], lines)


def _paper(name: str, baseline: str) -> str:
    """The paper's shapes, µs: warps that communicate over the paper's baseline or another, and NCCL + cuBLAS."""
    (ours,) = (one.name for one in list_variants("gemm_all_scatter") if one.agent is Agent.COMM_WARPS)
    rows = frames.read_frame(RESULTS / f"{name}.csv")
    at = rows[(rows.family == "gemm_all_scatter") & (rows.shape_set == "paper")]
    table = at.pivot_table(index=["m", "n", "k"], columns="variant", values="time_us").sort_values("library")
    table = table.rename(columns={ours: "ours"})
    cells = []
    for row in frames.rows_of(table.reset_index()):
        compared = getattr(row, baseline), row.library
        over = (f"{time_us / row.ours:.2f}×" for time_us in compared)
        times = (*compared, row.ours, row.gemm_alone)
        cells.append([f"{row.m}, {row.n}, {row.k}", *map(_us, times), *over])
    header = ["M, N, K", f"`{baseline}`", "NCCL + cuBLAS", f"`{ours}`", "GEMM alone"]
    return markdown([*header, f"over `{baseline}`", "over NCCL + cuBLAS"], cells)


TABLES: dict[str, Callable[[], str]] = {
    "files": files,
    "stress": stress,
    "llama-3-70b": partial(_model, "Llama-3-70B"),
    "losses": partial(_losses, *MACHINES.values()),
    "losses-of-four": partial(_losses, MACHINES["h200x4"]),
    "layers": _layers,
    "decoder": partial(_decoder, "decoder-h100x2"),
    "paper-h200x4": partial(_paper, "h200x4-large-bf16", "library_layout"),
    "paper-h200x2": partial(_paper, "h200x2-paper-bf16", "library_list"),
    "links": _links,
    "scale-out": lambda: markdown(scale_out.HEADER, scale_out.table()),
    "ccl": partial(_ccl, "ccl-h200x2", "ccl-variants-h200x2"),
    "epilogue": partial(_epilogue, "epilogue-h200x2"),
    **{f"{name}-summary": partial(_summary, machine) for name, machine in MACHINES.items()},
    **{f"{name}-small-m": partial(_small_m, machine) for name, machine in MACHINES.items()},
    **{f"{name}-host": partial(_host, MACHINES[name]) for name in ("h200x4", "h200x2")},
    **{f"{name}-m8192": partial(_problems, MACHINES[name], 8192, False) for name in ("h200x4", "h200x2")},
    **{
        f"{name}-layers-m{m}": partial(_problems, MACHINES[name], m, True)
        for name in ("h200x4", "h200x2")
        for m in (8192, 64)
    },
}
