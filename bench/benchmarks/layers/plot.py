"""A picture of ``iris-bench layers``: a group of bars a pair of layers, a bar a subject."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...records.looks import LOOKS, NO_BAR, save, use_files
from ...records.report import INTERPRETED
from .record import LayersRecord
from .subjects import ALONE, SUBJECTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST_INCHES = 7.5  # wide, for the title and the legend
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # a number, where a line crosses it
_GROUP = 0.84  # of the room of a group, that its bars take


def plot_layers(records: Sequence[LayersRecord], path: Path) -> None:
    """Draw speedup over torch's layers, a panel a layout and phase, with that of the products alone marked.

    Without a GPU interpreted time.

    Raises:
        ValueError: there is nothing to draw.
    """
    use_files()
    from matplotlib import pyplot as plt

    panels: dict[tuple[str, str], list[LayersRecord]] = {}
    for record in records:
        panels.setdefault((record.layout, record.phase), []).append(record)
    if not any(map(_height, records)):
        raise ValueError("there are no layers beside torch's to plot; measure the subject torch, too")
    most = max(len(_groups(rows)) for rows in panels.values())
    size = (max(_LEAST_INCHES, 2.5 + 2.2 * most), 0.9 + 2.6 * len(panels))
    figure, axes = plt.subplots(len(panels), figsize=size, squeeze=False, layout="constrained", sharey=True)
    for ax, ((layout, phase), rows) in zip(axes[:, 0], panels.items(), strict=True):
        _draw(ax, rows)
        ax.set_title(f"{layout}, {phase}", fontsize=10, loc="left")
    first = records[0]
    interpreted = f"; {INTERPRETED}" if first.device == "cpu" else ""
    figure.suptitle(f"{first.world_size} × {first.device_name}, {first.dtype}{interpreted}", fontsize=10)
    found = {label: handle for ax in axes[:, 0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    names = [name for name in SUBJECTS if name in found]
    figure.legend([found[name] for name in names], names, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def _height(record: LayersRecord) -> float | None:
    return record.time_us if record.device == "cpu" else record.speedup_vs_torch


def _groups(records: Sequence[LayersRecord]) -> list[tuple[int, int, int]]:
    return list(dict.fromkeys((one.tokens, one.width, one.features) for one in records))


def _draw(ax: Axes, records: Sequence[LayersRecord]) -> None:
    groups = _groups(records)
    names = [name for name in SUBJECTS if name != ALONE and any(one.subject == name for one in records)]
    bar = _GROUP / max(1, len(names))
    for one in records:
        left = groups.index((one.tokens, one.width, one.features)) - _GROUP / 2
        height = _height(one)
        if one.subject == ALONE:
            if height:
                ax.plot([left, left + _GROUP], [height] * 2, color="black", linestyle="--", linewidth=1.4, label=ALONE)
            continue
        x = left + (names.index(one.subject) + 0.5) * bar
        if height is None:
            said = one.status if one.status != "ok" else "no time of torch's"
            ax.text(x, 0, f" {said}", rotation=90, ha="center", va="bottom", fontsize=7, color=NO_BAR)
            continue
        ax.bar(x, height, bar * 0.92, color=LOOKS[one.subject].colour, label=one.subject)
        shown = f"{height:.3g}" if one.device == "cpu" else f"{height:.2f}"
        ax.annotate(shown, (x, height), (0, 3), textcoords="offset points", ha="center", fontsize=7, bbox=_BEHIND)
    labels = [f"{tokens} tokens\n{width} to {features} and back" for tokens, width, features in groups]
    ax.set_xticks(range(len(groups)), labels, fontsize=8)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.margins(y=0.14)
    if records[0].device == "cpu":
        ax.set_ylabel("interpreted time, us")
    else:
        ax.set_ylabel("speedup over torch")
        ax.axhline(1.0, color=LOOKS["torch"].colour, linewidth=0.8, zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
