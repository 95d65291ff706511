"""A picture of predicted times: a time line a variant, of the SMs' work, what it waits for, and latency."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..records.looks import save, use_files

if TYPE_CHECKING:
    from .explain import Explanation

# The colours of docs/img: multiplying blue, the link green; waiting pale.
_COLOURS = {"work": "#3b6fb6", "wait for the link": "#d9d9d9", "latency": "#e08a2e", "link by itself": "#4c9f70"}


def plot_explanation(one: Explanation, path: Path) -> None:
    """Draw what each candidate's predicted time is made of, beside what measured problems make of it, and the ideal."""
    use_files()
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(9.0, 1.3 + 0.5 * len(one.candidates)), layout="constrained")
    for row, it in enumerate(one.candidates):
        start = 0.0
        lanes = (("latency", it.parts.latency_us), ("work", it.parts.work_us), ("wait for the link", it.parts.wait_us))
        for name, us in lanes:
            ax.barh(row, us, left=start, height=0.45, color=_COLOURS[name], label=name if row == 0 else None)
            start += us
        link = "link by itself"
        ax.barh(row + 0.32, it.parts.link_us, height=0.16, color=_COLOURS[link], label=link if row == 0 else None)
        ax.plot([it.us], [row], "|", color="black", markersize=14, label="corrected" if row == 0 else None)
        if it.measured_us:
            ax.plot([it.measured_us], [row], "D", color="black", markersize=5, label=None)
    ax.axvline(one.ideal_us, color="#b5485a", linewidth=1, linestyle="--", label="ideal, predicted")
    names = [f"{it.variant} *" if it.variant == one.choice.variant else it.variant for it in one.candidates]
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    most = max(min(it.us, 4 * one.candidates[0].us) for it in one.candidates)
    ax.set_xlim(0, 1.1 * max(most, one.ideal_us))
    ax.set_xlabel("predicted µs; a bar that ends outside is longer")
    ax.spines[["top", "right"]].set_visible(False)
    gpus = f"{one.machine.world_size} x {one.gpu.removeprefix('NVIDIA ')}"
    figure.suptitle(f"Prediction: {one.family} {one.shape}, {gpus}; auto takes {one.choice.variant}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    save(figure, path)
