"""Pictures of records: a panel per family, a row per problem, a point per variant, all panels on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from . import frames
from .looks import LOOKS, NO_BAR, Look, looks_of, save, use_files
from .record import LIBRARY, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 9.0  # inches, of 100 points on a page
_ROW = 0.27  # inches
_LEGEND_COLUMNS = 4  # full names of variants are long


def plot_records(records: Sequence[Record], path: Path, over: str = LIBRARY) -> None:
    """Draw speedups with the ideal marked or, without a GPU, interpreted time; losing cases too.

    `over` names what the speedups are over.

    Raises:
        ValueError: there is nothing to draw, or to compare with.
    """
    plot_frame(frames.over(frames.to_frame(records), over), path, over)


def plot_frame(frame: pd.DataFrame, path: Path, over: str = LIBRARY, title: str = "") -> None:
    """Draw rows as `frames.over` returns them; see `plot_records`."""
    drawn = frames.variants_only(frame)
    if drawn.empty:
        raise ValueError("there are no records of variants to plot")
    use_files()
    from matplotlib import pyplot as plt

    panels = [rows for _, rows in drawn.groupby(frames.SETUP, sort=False)]
    looks = looks_of(drawn.variant)
    heights = [rows.groupby(frames.PROBLEM).ngroups for rows in panels]
    legend_rows = -(-(len(looks) + 1) // _LEGEND_COLUMNS)
    size = (_WIDTH, 0.5 + 0.25 * legend_rows + 0.75 * len(panels) + _ROW * sum(heights))
    figure, axes = plt.subplots(
        len(panels), figsize=size, squeeze=False, layout="constrained", sharex=True, height_ratios=heights
    )
    for ax, rows in zip(axes[:, 0], panels, strict=True):
        _draw(ax, rows, looks)
        ax.tick_params(labelbottom=True)
    last = axes[-1, 0]
    is_cpu = (drawn.device == "cpu").all()
    last.set_xlabel("interpreted time, ms (not performance)" if is_cpu else f"speedup over {over}")
    found = {text: mark for ax in axes[:, 0] for mark, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    names = [name for name in (*looks, "ideal") if name in found]
    marks = [found[name] for name in names]
    figure.legend(marks, names, loc="outside upper center", ncols=_LEGEND_COLUMNS, frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    save(figure, path)


def _draw(ax: Axes, rows: pd.DataFrame, looks: dict[str, Look]) -> None:
    first = frames.rows_of(rows)[0]
    is_cpu = first.device == "cpu"
    ticks = []
    for place, (_, problem) in enumerate(rows.groupby(frames.PROBLEM, sort=False)):
        ticks.append(frames.labels(problem.head(1))[0])
        beside, unsupported = [], []
        for row in frames.rows_of(problem):
            value = row.time_us / 1e3 if is_cpu else row.speedup_vs_library
            if pd.isna(value):
                if row.status == "unsupported":
                    unsupported.append(row.variant)
                else:
                    beside.append(f"{row.variant}: {_instead(row)}")
                continue
            look = looks[row.variant]
            size = 10 if look.marker == "|" else 6
            ax.plot(value, place, look.marker, color=look.colour, markersize=size, label=row.variant, zorder=3)
        # Under the points, which may be anywhere in the row.
        under: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "top"}
        under["fontsize"] = 5.5
        if beside:
            ax.annotate("; ".join(beside), (1, place), (-3, -5), ha="right", color=NO_BAR, **under)
        if unsupported:
            ax.annotate(f"unsupported: {', '.join(unsupported)}", (0, place), (3, -5), color="gray", **under)
        ideal = (problem.library_us / problem.ideal_us).max()
        if not is_cpu and pd.notna(ideal):
            ax.plot(ideal, place, "|", color="black", markersize=13, markeredgewidth=1.5, label="ideal")
    if not is_cpu:
        ax.axvline(1.0, color=LOOKS[LIBRARY].colour, linewidth=0.8, zorder=0)
    ax.set_yticks(range(len(ticks)), ticks, fontsize=7.5)
    ax.set_ylim(len(ticks) - 0.5, -0.5)
    ax.grid(axis="both", color="#eeeeee", zorder=0)
    ax.set_axisbelow(True)
    title = f"{frames.name_of(first)}, {first.dtype}, {first.world_size} × {first.device_name}"
    ax.set_title(title + ("; interpreted: times are not performance" if is_cpu else ""), fontsize=9, loc="left")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)


def _instead(row: Any) -> str:
    """What stands where there is no point."""
    if row.status != "ok":
        return str(row.status)
    return "not timed" if pd.isna(row.time_us) else f"{row.time_us:,.0f} µs, no baseline"
