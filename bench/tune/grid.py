"""Predictions for a grid of problems, as the page docs/interactive shows them: a table that JavaScript reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch

from iris_kernels.common.choice.auto import baseline_of
from iris_kernels.common.choice.knowledge import Knowledge
from overlap_taxonomy import Variant, get_variant, list_families, list_variants

from ..measure.families import FAMILIES
from ..measure.shapes import SHAPE_SETS, Shape, layer_name
from ..records.record import OPERAND_DTYPES
from .explain import Product, gpu_name, shipped

GPUS = ("H100", "H200")
RANKS = (2, 4, 8)
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # rows of `auto`'s own table, too
_SIZES = (2048, 4096, 8192, 16384)
SCALES = {"bf16": "", "fp8": "row"}  # by dtype, as `iris-bench explain` takes them
_LONG_US = 100
_HEAD = "// Written by `make predictions` from the cost model; not to be edited by hand.\n"


def pairs(family: str) -> list[tuple[int, int]]:
    """Return the grid's (N, K) of a family: those of named layers, then powers of two."""
    collective = FAMILIES[family].collective
    named = [(n, k) for name in ("layers", "llama") for _, n, k in SHAPE_SETS[name].sizes(collective, 1)]
    return list(dict.fromkeys([*named, *itertools.product(_SIZES, _SIZES)]))


def grid() -> str:
    """Return the page's table, a line a product, as a script: a page that is opened as a file cannot fetch JSON."""
    about: dict[str, Any] = {"rows": ROWS, "scales": SCALES}
    about["families"] = {family: about_family(family) for family in list_families()}
    machines, lines = {}, []
    for name, ranks in itertools.product(GPUS, RANKS):
        gpu = gpu_name(name)
        known = shipped(gpu)
        machine = known.machine(ranks)
        assert machine is not None
        machines[machine.name] = {"gpu": name, "ranks": ranks, "isMeasured": machine.is_measured}
        for family, dtype in itertools.product(list_families(), SCALES):
            for n, k in pairs(family):
                times = list(product_times(known, ranks, family, n, k, dtype))
                lines.append(f'"{machine.name}/{family}/{dtype}/{n}x{k}": {_compact(times)}')
    table = ",\n".join(lines)
    head = _compact(about | {"machines": machines})
    return f"{_HEAD}const PREDICTIONS = {{\nabout: {head},\ntimes: {{\n{table}\n}}\n}};\n"


def product_times(known: Knowledge, ranks: int, family: str, n: int, k: int, dtype: str) -> Iterator[list[Any]]:
    """Yield what is predicted of a product for each number of `ROWS`, in µs.

    That is the ideal, the index of the variant that `auto` takes, why, and for each variant the parts of the predicted
    time (latency, work, wait for the link), what the bytes would take by themselves, and the time as measured problems
    correct it; None for a variant that is not modelled there.
    """
    operands = getattr(torch, OPERAND_DTYPES[dtype])
    product = Product(known, ranks, family, Shape(ROWS[-1], n, k), operands, SCALES[dtype])
    names = [one.name for one in variants_of(family)]
    for m in ROWS:
        assert product.row_of(m) == m
        of = {one.variant: one for one in product.candidates(m)}
        choice = product.choice(m)
        times = []
        for name in names:
            it = of.get(name)
            parts = it and (it.parts.latency_us, it.parts.work_us, it.parts.wait_us, it.parts.link_us, it.us)
            times.append(parts and [rounded(us) for us in parts])
        yield [rounded(product.ideal_us(m)), names.index(choice.variant), choice.why, *times]


def about_family(family: str) -> dict[str, Any]:
    """Return what the page says of a family: its grid, and its variants."""
    collective = FAMILIES[family].collective
    layers = [[n, k, layer_name(collective, n, k) or ""] for n, k in pairs(family)]
    variants = [
        {"name": one.name, "agent": one.agent.value, "sync": one.sync.value, "summary": one.summary}
        for one in variants_of(family)
    ]
    return {"pairs": layers, "variants": variants}


def variants_of(family: str) -> list[Variant]:
    """Return the variants that `auto` chooses from, the library's first."""
    ours = [one for one in list_variants(family) if one.has_kernels]
    return [get_variant(family, baseline_of(family)), *ours]


def rounded(us: float) -> float:
    """Return a time to a tenth of a microsecond, a long one to a whole one."""
    return round(us, 1) if us < _LONG_US else round(us)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
