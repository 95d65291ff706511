"""A picture of traces: time to the right, a row per program, or a warp with a part of its own; for a page 900 wide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from iris_core.tracing import Span

from ..records.looks import save, use_files
from .traced import KINDS, ROLES, Traced, role_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with any colour vision: work blue or green, the link orange or pink, waiting pale.
_COLOURS = {
    "multiply": "#0072b2",
    "add partials": "#009e73",
    "load partials": "#56b4e9",
    "store": "#e69f00",
    "push": "#d55e00",
    "send": "#cc79a7",
    "wait": "#d9d9d9",
}
_WIDTH = 9.0  # inches, of 100 points on a page
_DPI = 200
_ROW = 0.008  # inches; 132 programs and their loaders: 2.1
_LEAST_BAND, _GAP = 0.5, 0.06  # inches: of a role's rows, and between two roles'


def plot_traces(traces: Sequence[Traced], path: Path, *, interpreted: bool = False) -> None:
    """Draw one trace with all ranks below each other, or rank 0 of several of one problem, with one axis of time.

    Of `interpreted` kernels the picture says that it shows an order, and no time.

    Raises:
        ValueError: there is nothing to draw.
    """
    use_files()
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    if not all(any(traced.ranks) for traced in traces):
        raise ValueError("a trace is empty, there is nothing to draw")

    def lasted(one: Traced) -> str:
        return "" if interpreted else f": {one.total_us:.0f} µs"

    first = traces[0]
    if len(traces) == 1:
        clocks = "" if interpreted else f"; clocks within {first.accuracy_ns / 1e3:.1f} µs"
        title = f"{first.title}{lasted(first)}{clocks}"
        panels = [(f"rank {rank}", spans, first.begin_ns) for rank, spans in enumerate(first.ranks)]
    else:
        title = f"{first.family}, {first.problem}; rank 0"
        panels = [(f"{one.variant}{lasted(one)}", one.ranks[0], one.begin_ns) for one in traces]
    heights = [sum(_heights(spans).values()) or _LEAST_BAND for _, spans, _ in panels]  # a rank may have nothing to do
    figure, axes = plt.subplots(
        len(panels),
        figsize=(_WIDTH, 1.1 + sum(heights) + 0.3 * len(panels)),
        height_ratios=heights,
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for ax, (name, spans, start) in zip(axes[:, 0], panels, strict=True):
        _draw(ax, spans, start)
        ax.set_title(name, fontsize=10, loc="left", pad=3)
    axes[0, 0].set_xlim(0, max(traced.total_us for traced in traces) * 1.01)
    order = "interpreted: programs take turns, so this is an order, in which nothing overlaps, and no time"
    axes[-1, 0].set_xlabel(order if interpreted else "µs since the first program began")
    if interpreted:
        axes[-1, 0].set_xticks([])
    used = {_drawn_as(span) for _, spans, _ in panels for span in spans}
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in used]
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    save(figure, path, dpi=_DPI)


def _heights(spans: Sequence[Span]) -> dict[int, float]:
    """Return how many inches the rows of each role take, with the gap below them."""
    programs = _programs(spans)
    return {role: max(_LEAST_BAND, len(programs[role]) * _ROW) + _GAP for role in sorted(programs)}


def _draw(ax: Axes, spans: Sequence[Span], start: int) -> None:
    """Draw a rank's spans, role by role, in inches from the top."""
    programs = _programs(spans)
    bars: dict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        bar = ((span.begin_ns - start) / 1e3, (span.end_ns - span.begin_ns) / 1e3)
        bars[role_of(span), span.program, _drawn_as(span)].append(bar)
    top, middles, labels = 0.0, [], []
    for role, height in _heights(spans).items():
        row = (height - _GAP) / len(programs[role])
        for index, program in enumerate(programs[role]):
            for name, colour in _COLOURS.items():
                if found := bars.get((role, program, name)):
                    place = (top + index * row, row)
                    ax.broken_barh(found, place, facecolors=colour, linewidth=0, rasterized=True)
        middles.append(top + (height - _GAP) / 2)
        labels.append(f"{len(programs[role])}\n{ROLES[role]}s")
        top += height
    ax.set_yticks(middles, labels, fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(top or _LEAST_BAND, 0)
    ax.spines[["top", "right"]].set_visible(False)


def _programs(spans: Sequence[Span]) -> dict[int, list[int]]:
    """Return the programs that wrote spans, by role."""
    found: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        found[role_of(span)].add(span.program)
    return {role: sorted(programs) for role, programs in found.items()}


def _drawn_as(span: Span) -> str:
    """Return a key of _COLOURS; all waits look the same, the row says who waits."""
    name = KINDS[span.kind]
    return "wait" if name.startswith("wait") else name
