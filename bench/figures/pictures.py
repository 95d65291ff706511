"""Each picture that comes from measurements, by the path that it is written to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..decoder.plot import plot_decoder
from ..decoder.record import DecoderRecord
from ..layers.plot import plot_layers
from ..layers.record import LayersRecord
from ..links.plot import plot_links
from ..links.record import LinkRecord
from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import layer_name
from ..records import frames
from ..records.looks import LOOKS, OURS, save, use_files
from ..records.plot import plot_frame
from ..records.record import read_as
from .results import FAMILIES, FRONT_PAGE, MACHINES, OTHERS, RESULTS, Machine, small

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GATHERS = "all_gather_gemm"
_SUMS = "gemm_reduce_scatter"
_BARS = {OURS: "iris-overlap", "async_tp": "torch async-TP", "kraken": "kraken"}


def _speedups(path: Path) -> None:
    """The front page's: a bar a project, a group a layer, side by side for many and few rows."""
    use_files()
    from matplotlib import pyplot as plt

    best = MACHINES["h200x4"].best
    best = best[best.family.isin((_GATHERS, _SUMS)) & best.m.isin((8192, 64)) & ~best.held_up]
    names = [layer_name(OF_BENCH[row.family].collective, row.n, row.k) or "" for row in frames.rows_of(best)]
    best = best.assign(layer=names)
    best = best[best.layer.str.partition(" ")[0].isin(FRONT_PAGE)]
    groups = sorted(set(zip(best.layer, best.family, strict=True)), key=_order)
    places = {group: place for place, group in enumerate(groups)}
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 4.2), layout="constrained", sharex=True, sharey=True)
    for ax, m in zip(axes, (8192, 64), strict=True):
        _bars(ax, best[best.m == m], places)
        missing = [_BARS[name] for name in OTHERS if best[best.m == m][name].isna().all()]
        note = f" ({' and '.join(missing)} not measured)" if missing else ""
        ax.set_title(f"M = {m}{note}", fontsize=9, loc="left")
    labels = [f"all-gather + {name}" if family == _GATHERS else f"{name} + reduce-scatter" for name, family in places]
    axes[0].set_yticks(range(len(places)), labels, fontsize=8)
    axes[0].set_ylim(len(places) - 0.5, -0.5)
    found = {text: bar for ax in axes for bar, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    date = best.timestamp.max()[:10]
    figure.suptitle(f"Speedup over NCCL + cuBLAS: 4 × H200 (NVLink 4), bf16, {date}", fontsize=11)
    save(figure, path)


def _order(key: tuple[str, str]) -> tuple[int, bool, str]:
    """By model, then what is gathered before what is summed."""
    layer, family = key
    return FRONT_PAGE.index(layer.partition(" ")[0]), family != _GATHERS, layer


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
            ax.annotate(f"{speedup:.2f}×", (speedup, y), (2, 0), textcoords="offset points", va="center", fontsize=7)
    ax.axvline(1.0, color=LOOKS["library"].colour, linewidth=1, label="NCCL + cuBLAS")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)


def _small_m(machine: Machine, path: Path) -> None:
    """Speedup by M, a panel a family, all on one scale: the mean over the layers, and the range around it."""
    use_files()
    from matplotlib import pyplot as plt

    best = small(machine.best)
    figure, axes = plt.subplots(1, len(FAMILIES), figsize=(9.0, 2.9), layout="constrained", sharey=True)
    for ax, family in zip(axes, FAMILIES, strict=True):
        at = best[best.family == family]
        speedups = (at.library / at.time_us).groupby(at.m)
        mean, bound = speedups.agg(frames.geomean), (at.library / at.ideal_us).groupby(at.m).agg(frames.geomean)
        colour, label = LOOKS[OURS].colour, "iris-overlap: mean and range over the layers"
        ax.fill_between(mean.index, speedups.min(), speedups.max(), color=colour, alpha=0.2, linewidth=0)
        ax.plot(mean.index, mean, "o-", color=colour, markersize=4, label=label)
        ax.plot(bound.index, bound, "k--", linewidth=1, label="ideal: the GEMM alone, or the bytes")
        ax.axhline(1.0, color=LOOKS["library"].colour, linewidth=1, label="NCCL + cuBLAS")
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 8, 32, 128, 512], ["1", "8", "32", "128", "512"], fontsize=8)
        ax.set_title(family, fontsize=9, loc="left")
        ax.set_xlabel("M", fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("speedup over NCCL + cuBLAS", fontsize=8)
    handles, texts = axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"M ≤ 512, layers of language models, {machine.title}, bf16", fontsize=10)
    save(figure, path)


def _run(*names: str, over: str = "library") -> Callable[[Path], None]:
    """All variants of CSVs of ``iris-bench run``."""

    def draw(path: Path) -> None:
        rows = frames.read_frame(*(RESULTS / f"{name}.csv" for name in names))
        plot_frame(frames.over(rows, over), path, over)

    return draw


def _layers(path: Path) -> None:
    plot_layers(read_as(RESULTS / f"{path.stem}.csv", LayersRecord, speak=False), path)


def _decoder(path: Path) -> None:
    plot_decoder(read_as(RESULTS / f"{path.stem}.csv", DecoderRecord, speak=False), path)


def _links(path: Path) -> None:
    plot_links(read_as(RESULTS / f"{path.stem}.csv", LinkRecord, speak=False), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "docs/img/speedup.svg": _speedups,
    "results/h200x4-large-bf16.png": _run("h200x4-large-bf16"),
    "results/h200x2-large-bf16.png": _run("h200x2-large-bf16", "h200x2-all-reduce-bf16"),
    "results/h200x4-small-m.png": partial(_small_m, MACHINES["h200x4"]),
    "results/h200x2-small-m.png": partial(_small_m, MACHINES["h200x2"]),
    "results/h200x4-paper-over-list.png": _run("h200x4-paper-bf16", over="library_list"),
    "results/h200x2-paper-over-list.png": _run("h200x2-paper-bf16", over="library_list"),
    "results/layers-h200x2.png": _layers,
    "results/decoder-h100x2.png": _decoder,
    "results/h200x4-links.png": _links,
    "results/h200x2-links.png": _links,
}
