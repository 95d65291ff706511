"""Draw the time line of each overlap pattern into docs/img/. An illustration: every length is chosen, none measured.

- python docs/draw_timelines.py
"""

from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

IMAGES = Path(__file__).parent / "img"

# From top to bottom. "comm SMs" are those that a variant sets apart, or that the library's collective takes.
LANES = ("compute SMs", "comm SMs", "copy engine", "link")
COLORS = {"compute": "#3b6fb6", "push": "#e08a2e", "copy": "#7d5ba6", "link": "#4c9f70"}
INK = "#2b2f36"
FAINT = "#aeb4bd"
LANE_HEIGHT = 0.62
END_OF_AXIS = 7.9

# The pieces of a rank's result that are sent as one, and how long each is multiplied and sent.
PIECES = 4
COMPUTE = 1.0
COMPUTE_ON_FEWER_SMS = 1.08
SEND = 0.8
STORE = 0.3  # an epilogue's stores, until the program goes on to its next tile


@dataclass
class Timeline:
    """What happens on the lanes of one rank during a call.

    Args:
        bars: (lane, kind, start, length, text).
        arrows: (from lane, time, to lane, time): a piece that is announced, or a store that enters the link.
        kernels: (name, first lane, last lane, start, stop): outlines of kernels, and of a stream of copies.
    """

    bars: list[tuple[str, str, float, float, str]] = field(default_factory=list)
    arrows: list[tuple[str, float, str, float]] = field(default_factory=list)
    kernels: list[tuple[str, str, str, float, float]] = field(default_factory=list)

    def add(self, lane: str, kind: str, start: float, length: float, text: str) -> float:
        """Add a bar; return when it ends."""
        self.bars.append((lane, kind, start, length, text))
        return start + length

    @property
    def end(self) -> float:
        return max(start + length for _, _, start, length, _ in self.bars)


def library() -> Timeline:
    line = Timeline()
    end = _compute_all(line, COMPUTE)[-1]
    line.kernels.append(("torch.mm", "compute SMs", "compute SMs", 0, end))
    sent = line.add("comm SMs", "push", end, PIECES * SEND, "collective")
    line.add("link", "link", end, PIECES * SEND, "1 – 4")
    line.kernels.append(("the vendor's kernel", "comm SMs", "comm SMs", end, sent))
    return line


def bulk_synchronous() -> Timeline:
    line = Timeline()
    end = _compute_all(line, COMPUTE)[-1]
    line.kernels.append(("GEMM kernel", "compute SMs", "compute SMs", 0, end))
    sent = line.add("compute SMs", "push", end, PIECES * SEND, "all SMs push")
    line.add("link", "link", end, PIECES * SEND, "1 – 4")
    line.kernels.append(("push kernel", "compute SMs", "compute SMs", end, sent))
    return line


def producer_consumer() -> Timeline:
    line = Timeline()
    end, sent = _compute_and_push(line)
    line.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, end))
    line.kernels.append(("push kernel, stream 2", "comm SMs", "comm SMs", 0, sent))
    return line


def fused_sequential() -> Timeline:
    line = Timeline()
    now = link_free = 0.0
    for piece in range(1, PIECES + 1):
        now = line.add("compute SMs", "compute", now, COMPUTE, str(piece))
        start = max(now, link_free)
        line.arrows.append(("compute SMs", now, "link", start))
        now = line.add("compute SMs", "push", now, STORE, "")
        link_free = line.add("link", "link", start, SEND, str(piece))
    line.kernels.append(("one kernel", "compute SMs", "compute SMs", 0, now))
    return line


def workgroup_specialized() -> Timeline:
    line = Timeline()
    _, sent = _compute_and_push(line)
    line.kernels.append(("one kernel", "compute SMs", "comm SMs", 0, sent))
    return line


def copy_engine() -> Timeline:
    line = Timeline()
    now = 0.0
    computed = _compute_all(line, COMPUTE)
    for piece, done in enumerate(computed, start=1):
        start = max(done, now)
        line.arrows.append(("compute SMs", done, "copy engine", start))
        now = line.add("copy engine", "copy", start, SEND, str(piece))
        line.add("link", "link", start, SEND, str(piece))
    line.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    line.kernels.append(("copies, stream 2", "copy engine", "copy engine", computed[0], now))
    return line


def _compute_all(line: Timeline, length: float) -> list[float]:
    """Add the multiplication of every piece; return when each is done."""
    return [
        line.add("compute SMs", "compute", (piece - 1) * length, length, str(piece)) for piece in range(1, PIECES + 1)
    ]


def _compute_and_push(line: Timeline) -> tuple[float, float]:
    computed = _compute_all(line, COMPUTE_ON_FEWER_SMS)
    now = 0.0
    for piece, done in enumerate(computed, start=1):
        start = max(done, now)
        line.arrows.append(("compute SMs", done, "comm SMs", start))
        now = line.add("comm SMs", "push", start, SEND, str(piece))
        line.add("link", "link", start, SEND, str(piece))
    return computed[-1], now


def draw(line: Timeline, path: Path) -> None:
    """Write a picture of a time line."""
    figure, axes = plt.subplots(figsize=(9, 3.3))
    axes.set_xlim(-0.08, END_OF_AXIS)
    axes.set_ylim(-0.62, len(LANES) - 0.38)
    axes.invert_yaxis()
    for lane in LANES:
        axes.axhline(LANES.index(lane), color="#eceef1", linewidth=17, zorder=0)
    for lane, kind, start, length, text in line.bars:
        _bar(axes, LANES.index(lane), COLORS[kind], start, length, text)
    for source, left, target, right in line.arrows:
        _arrow(axes, left, LANES.index(source) + LANE_HEIGHT / 2, right, LANES.index(target) - LANE_HEIGHT / 2)
    for name, first, last, start, stop in line.kernels:
        _outline(axes, name, LANES.index(first), LANES.index(last), start, stop)
    axes.axvline(line.end, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.text(line.end + 0.07, len(LANES) - 0.45, "sent", color=INK, fontsize=9, va="bottom")
    _decorate(axes, path.stem)
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)


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
    else:  # below: arrows come from above
        axes.text(start + 0.02, last + margin + 0.03, name, color=INK, fontsize=8.5, va="top")


def _decorate(axes: Axes, name: str) -> None:
    axes.set_yticks(range(len(LANES)), LANES, fontsize=10, color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_xlabel("time on one rank (illustration, not measured)", color=INK, fontsize=9, loc="right")
    axes.set_title(name, loc="left", fontsize=12, color=INK, fontweight="bold", pad=12)


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "timelines", "font.family": "DejaVu Sans"})
    patterns = (
        library,
        bulk_synchronous,
        producer_consumer,
        fused_sequential,
        workgroup_specialized,
        copy_engine,
    )
    IMAGES.mkdir(exist_ok=True)
    for pattern in patterns:
        draw(pattern(), IMAGES / f"{pattern.__name__}.svg")


if __name__ == "__main__":
    main()
