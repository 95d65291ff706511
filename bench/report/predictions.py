"""Predicted times beside measured ones, what going by them lost, and what ``iris-bench explain`` prints."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from iris_kernels.common.choice.auto import NAME as AUTO
from overlap_taxonomy import machine_for, predict_us

from ..measure.shapes import Shape
from ..records import frames
from ..records.record import LIBRARY
from ..records.report import WIDTH
from ..tune.explain import explain, gpu_name, shipped
from ..tune.explain_cli import print_explanation
from ..tune.measured import work_of
from .evidence import Machine, of_ours

_FAMILY, _SHAPE, _GPU, _WORLD_SIZE = "gemm_reduce_scatter", Shape(300, 8192, 28672), "H200", 2
EXPLAIN_COMMAND = f"iris-bench explain {_SHAPE} --family {_FAMILY} --gpu {_GPU} --world-size {_WORLD_SIZE}"


def predicted(machine: Machine) -> pd.DataFrame:
    """Return the timed rows of variants the model knows, of `library` and of `auto`, with `predicted_us`.

    It is NaN for `auto`, which is none of the model's variants.
    """
    constants = machine_for(machine.device_name, machine.world_size)
    rows = machine.rows[(machine.rows.status == "ok") & machine.rows.time_us.notna()]
    rows = rows[of_ours(rows) | rows.variant.isin((LIBRARY, AUTO))]
    if constants is None:
        return rows.iloc[:0].assign(predicted_us=[])
    found = [predict_us(constants, row.variant, work_of(row)) for row in frames.rows_of(rows)]
    rows = rows.assign(predicted_us=np.array(found, dtype=float))
    return rows[rows.predicted_us.notna() | (rows.variant == AUTO)]


def taken_over_fastest(rows: pd.DataFrame) -> pd.Series:
    """Return, of each problem, the measured time of the variant with the shortest prediction over the shortest time."""
    modelled = rows[rows.predicted_us.notna()].reset_index(drop=True)
    problems = modelled.groupby(frames.PROBLEM)
    taken = modelled.loc[problems.predicted_us.idxmin()].set_index(frames.PROBLEM).time_us
    return taken / problems.time_us.min().reindex(taken.index)


def auto_over_fastest(rows: pd.DataFrame) -> pd.Series:
    """Return, of each problem in which `auto` was measured, its time over the shortest of all."""
    auto = rows[rows.variant == AUTO].set_index(frames.PROBLEM).time_us
    fastest = rows[rows.variant != AUTO].groupby(frames.PROBLEM).time_us.min()
    return (auto / fastest.reindex(auto.index)).dropna()


def explain_output() -> str:
    """Return `EXPLAIN_COMMAND` and its output, by what comes with the library, as a block of text."""
    gpu, text = gpu_name(_GPU), io.StringIO()
    one = explain(gpu, _WORLD_SIZE, _FAMILY, _SHAPE, torch.bfloat16, shipped(gpu))
    print_explanation(Console(file=text, width=WIDTH, highlight=False), one)
    lines = [f"$ {EXPLAIN_COMMAND}", *(line.rstrip() for line in text.getvalue().splitlines())]
    return "\n".join(["```", *lines, "```"])
