"""Where the fastest variant is slower than NCCL + cuBLAS, by family, model and problem, or than other projects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch

from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.decoder.show import best as fastest_row
from ..benchmarks.decoder.show import model_name, step_name
from ..benchmarks.decoder.systems import IRIS, TORCH
from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import MODELS, Model, Shape, layer_name
from ..records import frames
from ..tune.explain import Product, shipped
from .evidence import FAMILIES, M_GROUPS, OTHERS, decoder_steps, in_time, machine_of, several
from .markdown import SHORT, sizes, table, times, us


def by_family() -> str:
    """Return how often the fastest variant is slower on several GPUs, and where it is slowest."""
    rows = []
    for machine in several():
        for family in FAMILIES:
            timed = in_time(machine)
            timed = timed[timed.family == family]
            for label, at in (("M > 512", timed[timed.m > 512]), ("M ≤ 512", timed[timed.m <= 512])):
                slower = int((at.time_us > at.library).sum())
                if not slower:
                    continue
                worst = frames.rows_of(at.sort_values("speedup_vs_library"))[0]
                layer = layer_name(OF_BENCH[family].collective, worst.n, worst.k)
                where = sizes(worst.m, worst.n, worst.k) + (f" ({layer})" if layer else "")
                counts = [f"{slower} of {len(at)}", times(worst.speedup_vs_library), where, worst.timestamp[:10]]
                rows.append([machine.title, SHORT[family], label, *counts])
    return table(["GPUs", "family", "tokens (M)", "slower in", "slowest", "at M × N × K", "measured"], rows)


def by_model() -> str:
    """Return, of each language model, in how many problems of its layers the fastest variant is slower, and the worst.

    The last column is what `auto` takes there, by the times and the model that come with the library.
    """
    lines = []
    for model in MODELS:
        best = pd.DataFrame(_problems_of(model))
        if best.empty:
            continue
        slower = best.time_us > best.library
        at = [best.m.between(low, high) for _, low, high in M_GROUPS]
        counts = [f"{int((slower & here).sum())} of {int(here.sum())}" for here in at]
        worst = frames.rows_of(best.sort_values("speedup_vs_library"))[0]
        where = [f"{worst.layer}, {SHORT[worst.family]}", str(worst.m), worst.gpus]
        spent = [us(worst.library), us(worst.time_us), times(worst.library / worst.time_us)]
        lines.append([model.name, *counts, *where, *spent, f"`{_taken(worst)}`"])
    groups = [f"slower at {name}" for name, _, _ in M_GROUPS]
    header = ["model", *groups, "worst layer", "M", "GPUs", "NCCL + cuBLAS", "iris-overlap", "speedup", "`auto` takes"]
    return table(header, lines)


def _problems_of(model: Model) -> Iterator[dict[str, Any]]:
    """Yield a model's layers on several GPUs, as rows of `Machine.best` with the layer's name."""
    for machine in several():
        for row in frames.rows_of(in_time(machine)):
            for layer, nk in model.layers(OF_BENCH[row.family].collective).items():
                if nk == (row.n, row.k):
                    yield row._asdict() | {"layer": layer, "gpus": machine.title}


def _taken(row: Any) -> str:
    """Return the variant that `auto` takes for a problem, of which no user's own times are known."""
    shape = Shape(row.m, row.n, row.k)
    return Product(shipped(row.device_name), row.world_size, row.family, shape, torch.bfloat16).choice(row.m).variant


def by_problem() -> str:
    """Return every problem on several GPUs in which the fastest variant is slower, the slowest first."""
    lines = []
    best = pd.concat([in_time(machine).assign(gpus=machine.title) for machine in several()])
    slower = best[best.time_us > best.library].sort_values("speedup_vs_library")
    for row in frames.rows_of(slower):
        layer = layer_name(OF_BENCH[row.family].collective, row.n, row.k) or ""
        cells = [sizes(row.m, row.n, row.k), layer, us(row.library), us(row.time_us)]
        speedup = times(row.library / row.time_us)
        lines.append([row.gpus, SHORT[row.family], *cells, speedup, f"`{row.variant}`", row.timestamp[:10]])
    said = f"In {len(slower)} of {len(best)} problems on several GPUs in bf16 the fastest variant is slower:"
    header = ["GPUs", "family", "M × N × K", "layer", "NCCL + cuBLAS", "iris-overlap", "speedup", "variant", "measured"]
    return f"{said}\n\n" + table(header, lines)


def to_other_operators() -> str:
    """Return where the fastest variant is slower than another project's fused operator, and steps than torch's best.

    A step counts for each of our systems by itself, as a user takes one of them for all steps.
    """
    lines = []
    for machine in several():
        timed = in_time(machine)
        for name in OTHERS:
            for row in frames.rows_of(timed[timed.time_us > timed[name]].sort_values(["m", "n", "k"])):
                layer = layer_name(OF_BENCH[row.family].collective, row.n, row.k) or ""
                what = " ".join(filter(None, (SHORT[row.family], sizes(row.m, row.n, row.k), layer)))
                theirs = getattr(row, name)
                cells = [us(theirs), f"`{row.variant}`", us(row.time_us), times(theirs / row.time_us)]
                lines.append([machine.title, what, f"`{name}`", *cells])
    lost = []
    for rows in decoder_steps():
        torchs, ours = _fastest(rows, TORCH), [one for one in (_fastest(rows, (name,)) for name in IRIS) if one]
        if not torchs or not ours:
            continue
        lost.append(min(spent for _, spent in ours) > torchs[1])
        first = rows[0]
        what = f"{model_name(first)}, {step_name(first)}"
        for system, spent in ours:
            if spent > torchs[1]:
                cells = [us(torchs[1]), f"`{system}`", us(spent), times(torchs[1] / spent)]
                lines.append([machine_of(first).title, what, f"`{torchs[0]}`", *cells])
    measured = [name for name in OTHERS if any(machine.best[name].notna().any() for machine in several())]
    said = (
        f"Layers in bf16: {', '.join(map(_counted, measured))}. Whole steps, the faster of `iris` and `iris_sequence` "
        f"over the best of torch's systems: slower in {sum(lost)} of {len(lost)}; its rows have either."
    )
    return f"{said}\n\n" + table(["GPUs", "what", "faster", "its µs", "iris-overlap", "µs", "speedup"], lines)


def _fastest(rows: Sequence[DecoderRecord], systems: Sequence[str]) -> tuple[str, float] | None:
    """Return which of some systems takes the shortest time for a step, and that, in µs; None where none has one."""
    row = fastest_row(rows, systems)
    return (row.system, row.time_us) if row and row.time_us else None


def _counted(name: str) -> str:
    """Say in how many problems another project's operator is faster than every variant."""
    timed = pd.concat([in_time(machine) for machine in several()])
    measured = timed[timed[name].notna()]
    return f"slower than `{name}` in {int((measured.time_us > measured[name]).sum())} of {len(measured)} problems"
