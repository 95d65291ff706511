"""Draw the time lines of each overlap pattern, a panel a family, into docs/img/. An illustration: every length is
chosen, none measured.

- python docs/draw_timelines.py
"""

from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

IMAGES = Path(__file__).parent / "img"
FAMILIES = ("gemm_all_scatter", "all_gather_gemm", "gemm_reduce_scatter")

# From top to bottom; a picture has those that its pattern uses. "comm SMs" are those that a variant sets apart, or that
# the library's collective takes.
LANES = ("compute SMs", "comm SMs", "copy engine", "link")
COLORS = {"compute": "#3b6fb6", "push": "#e08a2e", "copy": "#7d5ba6", "link": "#4c9f70", "sum": "#b5485a"}
INK = "#2b2f36"
FAINT = "#aeb4bd"
LANE_HEIGHT = 0.62
END_OF_AXIS = 7.9

# The pieces of a rank's work that are sent as one, in the order in which they are computed, and how long each takes.
# All-gather begins with the own shard and reduce-scatter ends with it; that one is not sent, or not awaited.
BLOCKS = ("1", "2", "3", "4")
GATHERED = ("own", "2", "3", "4")
REDUCED = ("1", "2", "3", "own")
COMPUTE = 1.0
COMPUTE_ON_FEWER_SMS = 1.08
COMPUTE_FROM_PEER = 1.35  # the main loop loads over the link
SEND = 0.8
STORE = 0.3  # an epilogue's stores, until the program goes on to its next tile
SUM = 0.25  # an epilogue that adds the peers' partials


@dataclass
class Timeline:
    """What happens on the lanes of one rank during a call.

    Args:
        bars: (lane, kind, start, length, text).
        arrows: (from lane, time, to lane, time): what is announced, or a store or load that crosses the link.
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


Panels = tuple[Timeline, Timeline, Timeline]  # in the order of FAMILIES


def library() -> Panels:
    scatter, gather, reduce = (Timeline() for _ in FAMILIES)
    for line, pieces, text, sent in ((scatter, BLOCKS, "1 – 4", 4), (reduce, REDUCED, "1 – 3", 3)):
        end = _compute(line, pieces)[-1]
        _collective(line, "comm SMs", end, sent, "collective", text)
        line.kernels.append(("torch.mm", "compute SMs", "compute SMs", 0, end))
        line.kernels.append(("the vendor's kernel", "comm SMs", "comm SMs", end, line.end))
    start = _collective(gather, "comm SMs", 0, 3, "collective", "2 – 4")
    end = _compute(gather, GATHERED, start=start)[-1]
    gather.kernels.append(("torch.mm", "compute SMs", "compute SMs", start, end))
    gather.kernels.append(("the vendor's kernel", "comm SMs", "comm SMs", 0, start))
    return scatter, gather, reduce


def bulk_synchronous() -> Panels:
    scatter, gather, reduce = (Timeline() for _ in FAMILIES)
    end = _compute(scatter, BLOCKS)[-1]
    _collective(scatter, "compute SMs", end, 4, "all SMs push", "1 – 4")
    scatter.kernels.append(("GEMM kernel", "compute SMs", "compute SMs", 0, end))
    scatter.kernels.append(("push kernel", "compute SMs", "compute SMs", end, scatter.end))
    start = _collective(gather, "compute SMs", 0, 3, "all SMs push", "2 – 4")
    end = _compute(gather, GATHERED, start=start)[-1]
    gather.kernels.append(("push kernel", "compute SMs", "compute SMs", 0, start))
    gather.kernels.append(("GEMM kernel", "compute SMs", "compute SMs", start, end))
    end = _compute(reduce, REDUCED)[-1]
    _collective(reduce, "compute SMs", end, 3, "all SMs pull and add", "1 – 3")
    reduce.kernels.append(("GEMM kernel", "compute SMs", "compute SMs", 0, end))
    reduce.kernels.append(("pull kernel", "compute SMs", "compute SMs", end, reduce.end))
    return scatter, gather, reduce


def producer_consumer() -> Panels:
    scatter, gather, reduce = (Timeline() for _ in FAMILIES)
    computed = _compute_and_send(scatter, BLOCKS, "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    scatter.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    scatter.kernels.append(("push kernel, stream 2", "comm SMs", "comm SMs", 0, scatter.end))
    sent = _gather_and_compute(gather, "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    gather.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, gather.end))
    gather.kernels.append(("push kernel, stream 2", "comm SMs", "comm SMs", 0, sent))
    computed = _compute_and_send(reduce, REDUCED[:3], "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    sent = reduce.end
    end = _sum_own(reduce, computed[-1], sent, COMPUTE_ON_FEWER_SMS)
    reduce.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    reduce.kernels.append(("sum kernel", "compute SMs", "compute SMs", computed[-1], end))
    reduce.kernels.append(("push kernel, stream 2", "comm SMs", "comm SMs", 0, sent))
    return scatter, gather, reduce


def fused_sequential() -> Panels:
    scatter, gather, reduce = (Timeline() for _ in FAMILIES)
    now, _ = _compute_and_store(scatter, BLOCKS)
    scatter.kernels.append(("one kernel", "compute SMs", "compute SMs", 0, now))
    now = gather.add("compute SMs", "compute", 0, COMPUTE, GATHERED[0])
    for shard in GATHERED[1:]:
        gather.arrows.append(("link", now + SEND / 4, "compute SMs", now + SEND / 2))
        gather.add("link", "link", now, COMPUTE_FROM_PEER, f"{shard} {shard} {shard} …")
        now = gather.add("compute SMs", "compute", now, COMPUTE_FROM_PEER, shard)
    gather.kernels.append(("one kernel", "compute SMs", "compute SMs", 0, now))
    now, arrived = _compute_and_store(reduce, REDUCED[:3])
    end = _sum_own(reduce, now, arrived, COMPUTE)
    reduce.kernels.append(("one kernel", "compute SMs", "compute SMs", 0, end))
    return scatter, gather, reduce


def workgroup_specialized() -> Panels:
    scatter, gather, reduce = (Timeline() for _ in FAMILIES)
    _compute_and_send(scatter, BLOCKS, "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    _gather_and_compute(gather, "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    computed = _compute_and_send(reduce, REDUCED[:3], "comm SMs", "push", COMPUTE_ON_FEWER_SMS)
    _sum_own(reduce, computed[-1], reduce.end, COMPUTE_ON_FEWER_SMS)
    for line in (scatter, gather, reduce):
        line.kernels.append(("one kernel", "compute SMs", "comm SMs", 0, line.end))
    return scatter, gather, reduce


def copy_engine() -> Panels:
    scatter, gather, reduce = (Timeline() for _ in FAMILIES)
    computed = _compute_and_send(scatter, BLOCKS, "copy engine", "copy", COMPUTE)
    scatter.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    scatter.kernels.append(("copies, stream 2", "copy engine", "copy engine", computed[0], scatter.end))
    sent = _gather_and_compute(gather, "copy engine", "copy", COMPUTE)
    gather.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, gather.end))
    gather.kernels.append(("copies, stream 2", "copy engine", "copy engine", 0, sent))
    computed = _compute_and_send(reduce, REDUCED[:3], "copy engine", "copy", COMPUTE)
    sent = reduce.end
    end = _sum_own(reduce, computed[-1], sent, COMPUTE)
    reduce.kernels.append(("GEMM kernel, stream 1", "compute SMs", "compute SMs", 0, computed[-1]))
    reduce.kernels.append(("sum kernel", "compute SMs", "compute SMs", computed[-1], end))
    reduce.kernels.append(("copies, stream 2", "copy engine", "copy engine", computed[0], sent))
    return scatter, gather, reduce


def _compute(line: Timeline, pieces: tuple[str, ...], length: float = COMPUTE, start: float = 0.0) -> list[float]:
    """Add the multiplication of pieces, one after the other; return when each is done."""
    return [
        line.add("compute SMs", "compute", start + index * length, length, piece) for index, piece in enumerate(pieces)
    ]


def _collective(line: Timeline, lane: str, start: float, pieces: int, text: str, sent: str) -> float:
    """Add a collective on everything at once; return when it is done."""
    line.add("link", "link", start, pieces * SEND, sent)
    return line.add(lane, "push", start, pieces * SEND, text)


def _compute_and_send(line: Timeline, pieces: tuple[str, ...], lane: str, kind: str, length: float) -> list[float]:
    """Add pieces that another lane sends when each is computed; return when each is computed."""
    computed = _compute(line, pieces, length)
    now = 0.0
    for piece, done in zip(pieces, computed, strict=True):
        start = max(done, now)
        line.arrows.append(("compute SMs", done, lane, start))
        now = line.add(lane, kind, start, SEND, piece)
        line.add("link", "link", start, SEND, piece)
    return computed


def _compute_and_store(line: Timeline, pieces: tuple[str, ...]) -> tuple[float, float]:
    """Add pieces that are sent by whom they are computed; return when that is done, and when the link is."""
    now = link_free = 0.0
    for piece in pieces:
        now = line.add("compute SMs", "compute", now, COMPUTE, piece)
        start = max(now, link_free)
        line.arrows.append(("compute SMs", now, "link", start))
        now = line.add("compute SMs", "push", now, STORE, "")
        link_free = line.add("link", "link", start, SEND, piece)
    return now, link_free


def _gather_and_compute(line: Timeline, lane: str, kind: str, length: float) -> float:
    """Add shards that are multiplied as they come, while the own one goes out; return when that is done."""
    now = line.add("compute SMs", "compute", 0, length, GATHERED[0])
    arrived = 0.0
    for shard in GATHERED[1:]:
        line.add(lane, kind, arrived, SEND, "own")
        arrived = line.add("link", "link", arrived, SEND, shard)
        start = max(now, arrived)
        line.arrows.append(("link", arrived, "compute SMs", start))
        now = line.add("compute SMs", "compute", start, length, shard)
    return arrived


def _sum_own(line: Timeline, start: float, arrived: float, length: float) -> float:
    """Add the own shard, whose epilogue adds what has arrived from the peers; return when that is done."""
    computed = line.add("compute SMs", "compute", start, length, REDUCED[-1])
    start = max(computed, arrived)
    line.arrows.append(("link", arrived, "compute SMs", start))
    return line.add("compute SMs", "sum", start, SUM, "+")


def draw(name: str, panels: Panels) -> None:
    """Write the picture of a pattern."""
    used = {bar[0] for line in panels for bar in line.bars}
    lanes = [lane for lane in LANES if lane in used]
    height = 0.74 * len(lanes) + 0.72
    figure, all_axes = plt.subplots(len(panels), figsize=(9, len(panels) * height), gridspec_kw={"hspace": 0.36})
    for family, line, axes in zip(FAMILIES, panels, all_axes, strict=True):
        _panel(axes, family, line, lanes)
    all_axes[-1].set_xlabel("time on one rank (illustration, not measured)", color=INK, fontsize=9, loc="right")
    figure.savefig(IMAGES / f"{name}.svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
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


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "timelines", "font.family": "DejaVu Sans"})
    IMAGES.mkdir(exist_ok=True)
    patterns = (
        library,
        bulk_synchronous,
        producer_consumer,
        fused_sequential,
        workgroup_specialized,
        copy_engine,
    )
    for pattern in patterns:
        draw(pattern.__name__, pattern())


if __name__ == "__main__":
    main()
