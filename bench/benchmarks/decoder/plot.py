"""A picture of ``iris-bench decoder``: a group of bars a step, a bar a system in its fastest mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...records.looks import LOOKS, save, use_files
from .record import DecoderRecord
from .show import best, by_step, model_name, step_name
from .systems import LIMIT, SYSTEMS

_GROUP = 0.84  # of the room of a group, that its bars take


def plot_decoder(records: Sequence[DecoderRecord], path: Path) -> None:
    """Draw each system's speedup over the best of torch's, with that of the limit marked.

    Raises:
        ValueError: there is nothing to draw.
    """
    use_files()
    from matplotlib import pyplot as plt

    groups = [rows for rows in by_step(records).values() if any(one.speedup_vs_torch for one in rows)]
    if not groups:
        raise ValueError("no step has a time of torch's to compare with")
    figure, ax = plt.subplots(figsize=(max(7.5, 2.0 + 1.6 * len(groups)), 3.8), layout="constrained")
    names = [name for name in SYSTEMS if name != LIMIT and any(best(rows, (name,)) for rows in groups)]
    bar, labelled = _GROUP / len(names), set()
    for place, rows in enumerate(groups):
        for number, name in enumerate(names):
            row = best(rows, (name,))
            if row is None or row.speedup_vs_torch is None:
                continue
            x, height = place - _GROUP / 2 + (number + 0.5) * bar, row.speedup_vs_torch
            label = name if name not in labelled else None
            labelled.add(name)
            ax.bar(x, height, bar * 0.92, color=LOOKS[name].colour, label=label)
            ax.annotate(f"{height:.2f}", (x, height), (0, 3), textcoords="offset points", ha="center", fontsize=7)
        limit = best(rows, (LIMIT,))
        if limit and limit.speedup_vs_torch:
            edges = [place - _GROUP / 2, place + _GROUP / 2]
            label = LIMIT if LIMIT not in labelled else None
            labelled.add(LIMIT)
            ax.plot(edges, [limit.speedup_vs_torch] * 2, color="black", linestyle="--", linewidth=1.4, label=label)
    gpus = f"{groups[0][0].world_size} × {groups[0][0].device_name}"
    models = [model_name(rows[0]) for rows in groups]
    steps = [step_name(rows[0]).replace(" ", "\n", 1) for rows in groups]
    if len(set(models)) > 1:
        ax.set_title(gpus, fontsize=10)
        steps = [f"{step}\n{model.replace(', ', chr(10))}" for step, model in zip(steps, models, strict=True)]
    else:
        ax.set_title(f"{models[0]}, {gpus}", fontsize=10)
    ax.set_xticks(range(len(groups)), steps, fontsize=8)
    ax.set_ylabel("speedup over the best of torch's")
    ax.axhline(1.0, color=LOOKS["torch"].colour, linewidth=0.8, zorder=0)
    ax.margins(y=0.14)
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)
