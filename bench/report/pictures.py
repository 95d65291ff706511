"""Each picture that comes from measurements, by the path that it is written to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from ..benchmarks.decoder.plot import plot_decoder
from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.layers.plot import plot_layers
from ..benchmarks.layers.record import LayersRecord
from ..benchmarks.links.plot import plot_links
from ..records.plot import plot_frame
from . import drawings
from .evidence import Machine, by_machine, decoder_steps, links, machine_of, several, small
from .paper import BASELINE, paper_rows

FRONT_PAGE = "docs/img/speedup.svg"
FOLDER = "docs/img/report"


class Picture(NamedTuple):
    """What a picture shows, in a line, and the function that draws it."""

    shows: str
    draw: Callable[[Path], None]


@functools.cache
def pictures() -> dict[str, Picture]:
    """Return all pictures, by the path from the root of the repository."""
    found = {
        FRONT_PAGE: Picture("named layers at M = 8192 and 64, speedup over NCCL + cuBLAS", drawings.layers),
        f"{FOLDER}/faster.svg": Picture("every problem's speedup over NCCL + cuBLAS", drawings.faster),
        f"{FOLDER}/patterns.svg": Picture("the share of problems in which each variant is fastest", drawings.patterns),
        f"{FOLDER}/limit.svg": Picture("overlap efficiency by the ideal time", drawings.limit),
        f"{FOLDER}/gains.svg": Picture("what the speedup of layers consists of", drawings.gains),
        f"{FOLDER}/losses.svg": Picture("speedups in order: how many problems lose, and how much", drawings.losses),
        f"{FOLDER}/predictions.svg": Picture("predicted over measured times", drawings.predictions),
        f"{FOLDER}/paper.svg": Picture("the paper's shapes and patterns, speedup over its baseline", _paper),
    }
    for machine in several():
        if len(of_many := _many_rows(machine)):
            of_all = f"every variant, M ≥ 2048, speedup over NCCL + cuBLAS, {machine.title}"
            found[f"{FOLDER}/{machine.name}-large.svg"] = Picture(of_all, partial(plot_frame, of_many))
        if len(small(machine.best)):
            fastest = f"the fastest variant at M = 1 to 512, {machine.title}"
            found[f"{FOLDER}/{machine.name}-small-m.svg"] = Picture(fastest, partial(drawings.small_m, machine))
    for machine, link_rows in links().items():
        bandwidth = f"bandwidth between every two ranks, {machine.title}"
        found[f"{FOLDER}/{machine.name}-links.svg"] = Picture(bandwidth, partial(plot_links, link_rows))
    for machine, layers_rows in by_machine(LayersRecord, lambda row: (row.pair_key, row.phase)).items():
        pairs = f"pairs of tensor-parallel layers, speedup over torch's, {machine.title}"
        found[f"{FOLDER}/{machine.name}-layers.svg"] = Picture(pairs, partial(plot_layers, layers_rows))
    steps: dict[Machine, list[DecoderRecord]] = {}
    for rows in decoder_steps():
        steps.setdefault(machine_of(rows[0]), []).extend(rows)
    for machine, decoder_rows in steps.items():
        shows = f"Llama layers end to end, speedup over the best of torch's, {machine.title}"
        found[f"{FOLDER}/{machine.name}-decoder.svg"] = Picture(shows, partial(plot_decoder, decoder_rows))
    return found


def _many_rows(machine: Machine) -> pd.DataFrame:
    return machine.rows[(machine.rows.m >= 2048) & (machine.rows.shape_set != "ragged")]


def _paper(path: Path) -> None:
    plot_frame(paper_rows(), path, BASELINE)
