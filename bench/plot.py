"""Pictures of records: a group of bars a shape, a bar a variant."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .outputs import writing
from .record import LIBRARY, YARDSTICKS, Record, latest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
_GROUPS_A_ROW = 8  # shapes side by side before a new row of axes begins
_BASELINE_COLOURS = ("#4d4d4d", "#808080", "#b3b3b3", "#d0d0d0")
# Okabe and Ito's palette, with violet for its black: told apart with any colour vision.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442", "#5d3a9b")
_HATCHES = ("", "////", "....", "xxxx")  # once the colours are used up, all of them again with the next


class Look(NamedTuple):
    """How the bars of a variant are filled."""

    colour: str
    hatch: str


def check_path(path: Path) -> None:
    """Raise ValueError unless a picture can be written under this name."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path} is no picture this command can write; end its name in {', '.join(FORMATS)}")


def plot_records(records: Sequence[Record], path: Path, over: str = LIBRARY) -> None:
    """Draw speedups with the ideal marked or, without a GPU, interpreted time; losing cases too.

    `over` names what the records' speedups are over.

    Raises:
        ValueError: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.artist import Artist
    from matplotlib.patches import Patch

    drawn = [record for record in latest(records) if record.variant not in YARDSTICKS]
    if not drawn:
        raise ValueError("there are no records of variants to plot")
    panels = _panels(drawn)
    looks = _looks(drawn)
    size = (2.0 + 1.7 * max(4, *(len(groups) for _, groups in panels)), 0.9 + 3.1 * len(panels))
    figure, axes = plt.subplots(len(panels), figsize=size, squeeze=False, layout="constrained")
    for ax, (title, groups) in zip(axes[:, 0], panels, strict=True):
        _draw(ax, title, groups, looks, over)
    handles: list[Artist] = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0, label=variant)
        for variant, look in looks.items()
    ]
    marks = [mark for ax in axes[:, 0] for mark in ax.get_legend_handles_labels()[0]]
    handles += marks[:1]  # of the ideal, if there is any
    columns = min(len(handles), int(size[0] / 1.75))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=150)
    plt.close(figure)


def _panels(records: Sequence[Record]) -> list[tuple[str, list[list[Record]]]]:
    """Shapes by what else they have in common, at most so many a panel; a shape is a list of its variants."""
    setups: dict[str, dict[tuple[object, ...], list[Record]]] = {}
    for record in records:
        title = f"{record.family}, {record.dtype}, {record.world_size} × {record.device_name}"
        setups.setdefault(title, {}).setdefault(record.problem_key, []).append(record)
    panels = []
    for title, problems in setups.items():
        groups = list(problems.values())
        panels += [(title, groups[start : start + _GROUPS_A_ROW]) for start in range(0, len(groups), _GROUPS_A_ROW)]
    return panels


def _looks(records: Sequence[Record]) -> dict[str, Look]:
    """A look for each variant, the same in all panels; no two have the same, of up to 32."""
    names = dict.fromkeys(record.variant for record in records)
    baselines = [name for name in names if name.startswith(LIBRARY)]
    others = [name for name in names if name not in baselines]
    looks: dict[str, Look] = {}
    for found, colours in ((baselines, _BASELINE_COLOURS), (others, _COLOURS)):
        fills = itertools.cycle(itertools.product(_HATCHES, colours))
        looks |= {name: Look(colour, hatch) for name, (hatch, colour) in zip(found, fills, strict=False)}
    return looks


def _draw(ax: Axes, title: str, groups: Sequence[Sequence[Record]], looks: dict[str, Look], over: str) -> None:
    is_cpu = groups[0][0].device == "cpu"
    present = {record.variant for group in groups for record in group}
    slots = {variant: index for index, variant in enumerate(name for name in looks if name in present)}
    bar = 0.84 / len(slots)
    for place, group in enumerate(groups):
        left = place - 0.42
        for record in group:
            x = left + (slots[record.variant] + 0.5) * bar
            value = record.time_us if is_cpu else record.speedup_vs_library
            if value is None:
                ax.text(
                    x, 0, f" {_instead(record)}", rotation=90, ha="center", va="bottom", fontsize=7, color="#b00020"
                )
                continue
            height = value / 1e3 if is_cpu else value
            look = looks[record.variant]
            ax.bar(x, height, bar * 0.92, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0)
            ax.annotate(
                f"{height:.2f}" if height < 10 else f"{height:.0f}",
                (x, height),
                xytext=(0, 3),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=6.5,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )
        if (ideal := _ideal(group)) and not is_cpu:
            ax.plot([left, left + 0.84], [ideal] * 2, color="black", linewidth=1.4, linestyle="--", label="ideal")
    ax.set_xticks(range(len(groups)), [f"{group[0].m}×{group[0].n}×{group[0].k}" for group in groups])
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.margins(y=0.16)
    if is_cpu:
        ax.set_ylabel("interpreted time, ms")
        title += "; interpreted: times are not performance"
    else:
        ax.set_ylabel(f"speedup over {over}")
        ax.axhline(1.0, color=_BASELINE_COLOURS[0], linewidth=0.8, zorder=0)
    ax.set_title(title, fontsize=10, loc="left")
    ax.tick_params(axis="x", length=0, labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _instead(record: Record) -> str:
    """What stands where there is no bar."""
    if record.status != "ok":
        return record.status
    return "not timed" if record.time_us is None else f"{record.time_us:,.0f} µs, no baseline"


def _ideal(group: Sequence[Record]) -> float | None:
    """The speedup of a perfect overlap."""
    for record in group:
        if record.ideal_us and record.library_us:
            return record.library_us / record.ideal_us
    return None
