"""Where the fastest variant is slower than NCCL + cuBLAS: by family, by model, and problem by problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from ..measure.families import FAMILIES as OF_BENCH
from ..measure.shapes import MODELS, Model, Shape, layer_name
from ..records import frames
from ..tune.explain import Product, shipped
from .evidence import FAMILIES, M_GROUPS, in_time, several
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
    return table(["GPUs", "family", "rows", "slower in", "slowest", "at M × N × K", "measured"], rows)


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
