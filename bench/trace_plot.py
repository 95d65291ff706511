"""A picture of a trace: time to the right, a line a program, the ranks one under the other."""

from __future__ import annotations

from pathlib import Path

from .trace import KINDS, Traced, begin_of, thread_of

# Okabe and Ito's palette, told apart with any colour vision: work blue, the link orange, waiting pale.
_COLOURS = {
    "multiply": "#0072b2",
    "store": "#e69f00",
    "wait": "#d9d9d9",
    "add partials": "#009e73",
    "push": "#d55e00",
    "wait to push": "#eeeeee",
}


def plot_trace(traced: Traced, path: Path) -> None:
    """Draw all spans.

    Raises:
        ValueError: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    if not any(traced.ranks):
        raise ValueError("the trace is empty, there is nothing to draw")
    start = begin_of(traced)
    rows = len(traced.ranks)
    figure, axes = plt.subplots(rows, figsize=(11, 1.2 + 2.2 * rows), squeeze=False, sharex=True, layout="constrained")
    for rank, (ax, found) in enumerate(zip(axes[:, 0], traced.ranks, strict=True)):
        lines = {thread: line for line, thread in enumerate(sorted(set(map(thread_of, found))))}
        bars: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for span in found:
            bar = ((span.begin_ns - start) / 1e3, (span.end_ns - span.begin_ns) / 1e3)
            bars.setdefault((lines[thread_of(span)], span.kind), []).append(bar)
        for (line, kind), of_line in bars.items():
            ax.broken_barh(of_line, (line - 0.45, 0.9), facecolors=_COLOURS[KINDS[kind]], linewidth=0)
        ax.set_ylabel(f"rank {rank}\nprogram")
        ax.set_ylim(len(lines) - 0.5, -0.5)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_title(f"{traced.title}; clocks within {traced.accuracy_ns / 1e3:.1f} µs", fontsize=10, loc="left")
    axes[-1, 0].set_xlabel("µs since the first program began")
    used = {KINDS[span.kind] for rank in traced.ranks for span in rank}
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
