"""Draw the time lines of timelines.py. Each picture carries a digest of that file and this one, by which a test tells
whether it is up to date.

- python docs/img/draw_timelines.py
"""

import hashlib
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from timelines import LANES, PATTERNS, Panels, Timeline

IMAGES = Path(__file__).parent
COLORS = {"compute": "#3b6fb6", "push": "#e08a2e", "copy": "#7d5ba6", "link": "#4c9f70", "sum": "#b5485a"}
INK = "#2b2f36"
FAINT = "#aeb4bd"
LANE_HEIGHT = 0.62
END_OF_AXIS = 8.3


def draw(name: str, panels: Panels) -> None:
    """Write the picture of a pattern."""
    used = [{bar[0] for bar in line.bars} for line in panels.values()]
    lanes = [[lane for lane in LANES if lane in panel] for panel in used]
    heights = [0.74 * len(panel) + 0.72 for panel in lanes]
    layout = {"hspace": 0.36, "height_ratios": heights}
    figure, grid = plt.subplots(len(panels), figsize=(9, sum(heights)), gridspec_kw=layout, squeeze=False)
    for (family, line), panel, axes in zip(panels.items(), lanes, grid[:, 0], strict=True):
        _panel(axes, family, line, panel)
    grid[-1, 0].set_xlabel("time on one rank (illustration, not measured)", color=INK, fontsize=9, loc="right")
    metadata = {"Date": None, "Description": digest()}
    figure.savefig(IMAGES / f"{name}.svg", bbox_inches="tight", facecolor="white", metadata=metadata)
    plt.close(figure)


def _panel(axes: Axes, family: str, line: Timeline, lanes: list[str]) -> None:
    axes.set_xlim(-0.08, END_OF_AXIS)
    axes.set_ylim(-0.62, len(lanes) - 0.38)
    axes.invert_yaxis()
    for index in range(len(lanes)):
        axes.axhline(index, color="#eceef1", linewidth=17, zorder=0)
    for lane, kind, start, length, text in line.bars:
        _bar(axes, lanes.index(lane), COLORS[kind], start, length, text)
    for source, left, target, right in line.arrows:
        top, bottom = lanes.index(source), lanes.index(target)
        half = LANE_HEIGHT / 2 if top < bottom else -LANE_HEIGHT / 2
        _arrow(axes, left, top + half, right, bottom - half)
    for name, first, last, start, stop in line.kernels:
        _outline(axes, name, lanes.index(first), lanes.index(last), start, stop)
    axes.axvline(line.end, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.text(line.end + 0.07, len(lanes) - 0.45, "complete", color=INK, fontsize=9, va="bottom")
    axes.set_yticks(range(len(lanes)), lanes, fontsize=10, color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_title(family, loc="left", fontsize=11, color=INK, fontweight="bold", pad=12)


def _bar(axes: Axes, lane: int, color: str, start: float, length: float, text: str) -> None:
    gap = 0.025
    shape = FancyBboxPatch(
        (start + gap, lane - LANE_HEIGHT / 2),
        length - 2 * gap,
        LANE_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=color,
        edgecolor="none",
        zorder=2,
    )
    axes.add_patch(shape)
    axes.text(start + length / 2, lane, text, color="white", fontsize=10, ha="center", va="center", zorder=3)


def _arrow(axes: Axes, left: float, top: float, right: float, bottom: float) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    axes.annotate("", xy=(right + 0.05, bottom), xytext=(left - 0.05, top), arrowprops=style, zorder=4)


def _outline(axes: Axes, name: str, first: int, last: int, start: float, stop: float) -> None:
    margin = LANE_HEIGHT / 2 + 0.08
    shape = FancyBboxPatch(
        (start - 0.02, first - margin),
        stop - start + 0.04,
        last - first + 2 * margin,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor="none",
        edgecolor=INK,
        linewidth=1.1,
        zorder=3,
    )
    axes.add_patch(shape)
    if first == 0:
        axes.text(start + 0.02, first - margin - 0.03, name, color=INK, fontsize=8.5, va="bottom")
    else:  # below: most arrows come from above; the others pass behind
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0}
        place = start + 0.05, last + margin + 0.04
        axes.text(*place, name, color=INK, fontsize=8.5, va="top", bbox=box, zorder=5)


def digest() -> str:
    """Return what tells this version of the drawings from others."""
    sources = "".join((IMAGES / name).read_text() for name in ("timelines.py", "draw_timelines.py"))
    return f"drawings {hashlib.sha256(sources.encode()).hexdigest()[:16]}"


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "timelines", "font.family": "DejaVu Sans"})
    for pattern in PATTERNS:
        draw(pattern.__name__, pattern())


if __name__ == "__main__":
    main()
