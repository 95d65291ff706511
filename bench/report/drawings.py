"""The pictures of the report's questions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import layer_name
from ..records import frames
from ..records.looks import LOOKS, OURS, looks_of, save, use_files
from .evidence import FAMILIES, OTHERS, Machine, in_time, machines, several, small
from .gains import gains as gains_of
from .markdown import SHORT, times
from .predictions import predicted
from .questions import on_16_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FRONT_PAGE_MACHINE = "h200x4"
_FRONT_PAGE_MODELS = ("Llama-3-8B", "Llama-3-70B", "Qwen2.5-72B")
_GATHERS = "all_gather_gemm"
_SUMS = "gemm_reduce_scatter"
_BARS = {OURS: "iris-overlap", "async_tp": "torch async-TP", "kraken": "kraken", "quack": "QuACK"}
_FAMILY_COLOURS = dict(zip(FAMILIES, ("#0072b2", "#e69f00", "#009e73", "#cc79a7"), strict=True))
_MACHINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#5d3a9b", "#e69f00", "#56b4e9")
_GAIN_COLOURS = {
    "GEMM alone": "#3b6fb6",
    "not hidden": "#e08a2e",
    "saved: overlap": "#4c9f70",
    "saved: layout": "#a8d3b8",
    "saved: faster GEMM": "#b5485a",
}
_FEW, _MANY = "#e69f00", "#0072b2"  # rows


def layers(path: Path) -> None:
    """Draw the front page's picture: a bar per project, a group per layer, side by side for many and few rows."""
    machine = machines()[FRONT_PAGE_MACHINE]
    best = in_time(machine)
    best = best[best.family.isin((_GATHERS, _SUMS)) & best.m.isin((8192, 64))]
    names = [layer_name(OF_BENCH[row.family].collective, row.n, row.k) or "" for row in frames.rows_of(best)]
    best = best.assign(layer=names)
    best = best[best.layer.str.partition(" ")[0].isin(_FRONT_PAGE_MODELS)]
    groups = sorted(set(zip(best.layer, best.family, strict=True)), key=_order)
    places = {group: place for place, group in enumerate(groups)}
    figure, axes = _figure(1, 2, (9.0, 4.2), sharex=True, sharey=True)
    for ax, m in zip(axes, (8192, 64), strict=True):
        _bars(ax, best[best.m == m], places)
        missing = [_BARS[name] for name in OTHERS if best[name].notna().any() and best[best.m == m][name].isna().all()]
        note = f" ({' and '.join(missing)} not measured)" if missing else ""
        ax.set_title(f"M = {m}{note}", fontsize=9, loc="left")
    labels = [f"all-gather + {name}" if family == _GATHERS else f"{name} + reduce-scatter" for name, family in places]
    axes[0].set_yticks(range(len(places)), labels, fontsize=8)
    axes[0].set_ylim(len(places) - 0.5, -0.5)
    _legend(figure, axes, columns=4)
    date = best.timestamp.max()[:10]
    figure.suptitle(f"Speedup over NCCL + cuBLAS: {machine.title}, bf16, {date}", fontsize=11)
    save(figure, path)


def _order(key: tuple[str, str]) -> tuple[int, bool, str]:
    """By model, then what is gathered before what is summed."""
    layer, family = key
    return _FRONT_PAGE_MODELS.index(layer.partition(" ")[0]), family != _GATHERS, layer


def _bars(ax: Axes, best: pd.DataFrame, places: dict[tuple[str, str], int]) -> None:
    shown = [name for name in _BARS if name == OURS or best[name].notna().any()]
    height = 0.84 / len(shown)
    for row in frames.rows_of(best):
        for index, name in enumerate(shown):
            time_us = row.time_us if name == OURS else getattr(row, name)
            if pd.isna(time_us):
                continue
            speedup, y = row.library / time_us, places[row.layer, row.family] + (index - (len(shown) - 1) / 2) * height
            ax.barh(y, speedup, min(0.4, height * 0.92), color=LOOKS[name].colour, label=_BARS[name])
            ax.annotate(times(speedup), (speedup, y), (2, 0), textcoords="offset points", va="center", fontsize=7)
    _baseline(ax.axvline, label="NCCL + cuBLAS")
    ax.tick_params(axis="y", length=0)


def faster(path: Path) -> None:
    """Draw each problem's speedup, a row per machine and family, with the geometric mean."""
    rows = [(machine, family) for machine in machines().values() for family in FAMILIES]
    rows = [(machine, family) for machine, family in rows if (in_time(machine).family == family).any()]
    figure, (ax,) = _figure(1, 1, (9.0, 0.9 + 0.27 * len(rows)))
    for place, (machine, family) in enumerate(rows):
        best = in_time(machine)
        at = best[best.family == family]
        speedups = at.library / at.time_us
        for colour, chosen, label in ((_MANY, at.m > 512, "M > 512"), (_FEW, at.m <= 512, "M ≤ 512")):
            level = place - 0.12 if colour == _MANY else place + 0.12
            ax.plot(
                speedups[chosen], [level] * int(chosen.sum()), "o", color=colour, markersize=3, alpha=0.6, label=label
            )
        mean = frames.geomean(speedups)
        ax.plot([mean], [place], "|", color="black", markersize=14, markeredgewidth=2, label="geometric mean")
    ax.set_xscale("log", base=2)
    ticks = [0.5, 0.75, 1, 1.5, 2, 3, 4, 6]
    ax.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=8)
    ax.minorticks_off()
    ax.set_yticks(range(len(rows)), [f"{machine.title}, {SHORT[family]}" for machine, family in rows], fontsize=8)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    _baseline(ax.axvline, label="NCCL + cuBLAS")
    _legend(figure, [ax], columns=4)
    figure.suptitle("Speedup of the fastest variant over NCCL + cuBLAS, a point per problem, bf16", fontsize=11)
    save(figure, path)


def patterns(path: Path) -> None:
    """Draw the share of problems in which each variant is the fastest, for few rows and many."""
    bars = [
        (f"{machine.title}, {SHORT[family]}, {label}", at)
        for machine in several()
        for family in FAMILIES
        for label, at in (
            ("M > 512", in_time(machine)[lambda best, family=family: (best.family == family) & (best.m > 512)]),
            ("M ≤ 512", in_time(machine)[lambda best, family=family: (best.family == family) & (best.m <= 512)]),
        )
        if len(at)
    ]
    looks = looks_of(pd.concat([at.variant for _, at in bars]))
    figure, (ax,) = _figure(1, 1, (9.0, 1.3 + 0.25 * len(bars)))
    for place, (_, at) in enumerate(bars):
        left = 0.0
        for variant, look in looks.items():
            share = float((at.variant == variant).mean())
            if share:
                ax.barh(place, share, 0.8, left=left, color=look.colour, label=variant)
                left += share
        ax.annotate(f"{len(at)}", (1.0, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_xlim(0, 1.04)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"], fontsize=8)
    _legend(figure, [ax], columns=3)
    figure.suptitle("The fastest variant, as a share of the problems (their number on the right), bf16", fontsize=11)
    save(figure, path)


def limit(path: Path) -> None:
    """Draw ideal over measured time of the fastest variant, by the ideal, a panel per machine."""
    shown = several()
    figure, axes = _figure(1, len(shown), (9.0, 3.6), sharey=True)
    for ax, machine in zip(axes, shown, strict=True):
        best = on_16_bytes(machine.best)
        for family, colour in _FAMILY_COLOURS.items():
            at = best[best.family == family]
            ax.plot(
                at.ideal_us, at.overlap_efficiency, "o", color=colour, markersize=3.5, alpha=0.7, label=SHORT[family]
            )
        ax.set_xscale("log")
        ax.set_xlabel("ideal, µs: the GEMM alone, or the bytes on the link", fontsize=8)
        ax.set_title(machine.title, fontsize=9, loc="left")
        _baseline(ax.axhline, label="the limit")
    axes[0].set_ylabel("overlap efficiency: ideal / time", fontsize=8)
    axes[0].set_ylim(bottom=0.0)
    _legend(figure, axes, columns=5)
    figure.suptitle("How far the fastest variant is from the limit, a point per problem, bf16", fontsize=11)
    save(figure, path)


def gains(path: Path) -> None:
    """Draw what each layer's baseline spends, as parts: the GEMM, what is not hidden, and what is saved."""
    machine = several()[0]
    found = gains_of(machine)
    figure, (ax,) = _figure(1, 1, (9.0, 1.1 + 0.27 * len(found)))
    for place, one in enumerate(found):
        spent = (one.alone_us - one.gemm_us, one.exposed_us, one.overlap_us, one.layout_us, one.gemm_us)
        left = 0.0
        for (name, colour), part_us in zip(_GAIN_COLOURS.items(), spent, strict=True):
            if part_us:
                ax.barh(place, part_us / one.baseline_us, 0.8, left=left, color=colour, label=name)
            left += part_us / one.baseline_us
        said = times(one.baseline_us / one.time_us)
        ax.annotate(said, (1.0, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set_yticks(range(len(found)), [f"{one.label}, {SHORT[one.family]}" for one in found], fontsize=8)
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_xlim(0, 1.08)
    ax.set_xlabel("share of the baseline's time; the speedup over it on the right", fontsize=8)
    _legend(figure, [ax], columns=5, names=_GAIN_COLOURS)
    figure.suptitle(f"What the gain consists of: M = 8192, {machine.title}, bf16", fontsize=11)
    save(figure, path)


def losses(path: Path) -> None:
    """Draw the speedups of each machine's problems in order: how many lie below one, and how far."""
    figure, (ax,) = _figure(1, 1, (9.0, 3.6))
    for machine, colour in zip(machines().values(), _MACHINE_COLOURS, strict=False):
        best = in_time(machine)
        speedups = (best.library / best.time_us).sort_values().to_numpy()
        shares = (pd.Series(range(len(speedups))) + 0.5) / len(speedups)
        slower = int((speedups < 1).sum())
        ax.plot(shares, speedups, color=colour, label=f"{machine.title}: {slower} of {len(speedups)} slower")
    ax.set_yscale("log", base=2)
    ticks = [0.5, 0.75, 1, 1.5, 2, 4, 6]
    ax.set_yticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=8)
    ax.minorticks_off()
    ax.axhspan(ax.get_ylim()[0], 1.0, color="#b5485a", alpha=0.08, linewidth=0)
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"], fontsize=8)
    ax.set_xlabel("problems, the slowest first", fontsize=8)
    _baseline(ax.axhline, label="NCCL + cuBLAS")
    _legend(figure, [ax], columns=3)
    figure.suptitle("Speedup of the fastest variant over NCCL + cuBLAS, in order, bf16", fontsize=11)
    save(figure, path)


def predictions(path: Path) -> None:
    """Draw predicted over measured times by the measured time, a panel per machine."""
    shown = list(machines().values())
    figure, axes = _figure(1, len(shown), (9.0, 3.6), sharey=True)
    for ax, machine in zip(axes, shown, strict=True):
        rows = predicted(machine)
        for family, colour in _FAMILY_COLOURS.items():
            at = rows[(rows.family == family) & rows.predicted_us.notna()]
            ax.plot(at.time_us, at.predicted_us / at.time_us, "o", color=colour, markersize=2, alpha=0.5,
                    label=SHORT[family])  # fmt: skip
        ax.set_xscale("log")
        ax.set_yscale("log", base=2)
        ax.set_xlabel("measured, µs", fontsize=8)
        ax.set_title(machine.title, fontsize=9, loc="left")
        _baseline(ax.axhline, label="as measured")
    ticks = [0.25, 0.5, 1, 2, 4]
    axes[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes[0].minorticks_off()
    axes[0].set_ylabel("predicted / measured", fontsize=8)
    _legend(figure, axes, columns=5)
    figure.suptitle("Predicted over measured time, a point per variant and problem, bf16", fontsize=11)
    save(figure, path)


def small_m(machine: Machine, path: Path) -> None:
    """Draw speedup by M, a panel per family, all on one scale: the mean over the layers, and the range around it."""
    best = small(machine.best)
    shown = [family for family in FAMILIES if (best.family == family).any()]
    figure, axes = _figure(1, len(shown), (9.0, 2.9), sharey=True)
    for ax, family in zip(axes, shown, strict=True):
        at = best[best.family == family]
        speedups = (at.library / at.time_us).groupby(at.m)
        mean, bound = speedups.agg(frames.geomean), (at.library / at.ideal_us).groupby(at.m).agg(frames.geomean)
        colour, label = LOOKS[OURS].colour, "iris-overlap: mean and range over the layers"
        ax.fill_between(mean.index, speedups.min(), speedups.max(), color=colour, alpha=0.2, linewidth=0)
        ax.plot(mean.index, mean, "o-", color=colour, markersize=4, label=label)
        ax.plot(bound.index, bound, "k--", linewidth=1, label="ideal: the GEMM alone, or the bytes")
        _baseline(ax.axhline, label="NCCL + cuBLAS")
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 8, 32, 128, 512], ["1", "8", "32", "128", "512"], fontsize=8)
        ax.set_title(family, fontsize=9, loc="left")
        ax.set_xlabel("M", fontsize=8)
    axes[0].set_ylabel("speedup over NCCL + cuBLAS", fontsize=8)
    _legend(figure, axes, columns=3)
    figure.suptitle(f"M ≤ 512, layers of language models, {machine.title}, bf16", fontsize=10)
    save(figure, path)


def _figure(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, list[Axes]]:
    """Return an empty picture, in inches, and its panels."""
    use_files()
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **shared)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def _baseline(line: Any, label: str) -> None:
    line(1.0, color=LOOKS["library"].colour, linewidth=1, zorder=0, label=label)


def _legend(figure: Figure, axes: list[Axes], columns: int, names: Iterable[str] = ()) -> None:
    """Say what colours mean, each once, below; in the order of `names`, or as they were drawn."""
    found = {text: mark for ax in axes for mark, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    shown = [name for name in names if name in found] or list(found)
    marks = [found[name] for name in shown]
    figure.legend(marks, shown, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
