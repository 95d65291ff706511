"""Rows of ``iris-bench run`` as a pandas table: what tables, pictures and comparisons are made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.layers.record import LayersRecord
from ..measure.families import FAMILIES
from ..measure.shapes import problem_label
from .record import LIBRARY, YARDSTICKS, Record, read_records

SETUP = ["family", "epilogue", "dtype", "scales", "world_size", "device", "device_name"]
PROBLEM = [*SETUP, "m", "n", "k"]
THING = [*PROBLEM, "variant"]
Row = TypeVar("Row", Record, LayersRecord, DecoderRecord)


def name_of(record: Any) -> str:
    """Return the family of a record, or of a row of a table of records, and what is applied to C."""
    return " + ".join(filter(None, (record.family, *record.epilogue.split(","))))


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Return rows as a table with the columns of `Record`, in their order; an empty cell is NaN or ""."""
    names = [column.name for column in fields(Record)]
    frame = pd.DataFrame(map(attrgetter(*names), records), columns=names)
    numbers = [column.name for column in fields(Record) if column.type == "float | None"]
    return frame.astype(dict.fromkeys(numbers, float))


def read_frame(*paths: Path) -> pd.DataFrame:
    """Return the rows of several CSVs, the latest of each thing measured, in the order in which they first came.

    Raises:
        ValueError: see `read_records`.
    """
    return latest(pd.concat([to_frame(read_records(path, speak=False)) for path in paths], ignore_index=True))


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the latest row of each thing measured on each kind of device, in the order of their first ones."""
    return frame.loc[_latest(frame.groupby(THING, sort=False).ngroup(), frame.timestamp)].reset_index(drop=True)


def latest_records(records: Sequence[Row]) -> list[Row]:
    """Return the latest record of each thing measured on each kind of device, in the order of their first ones."""
    things, _ = pd.factorize(pd.Series([record.thing for record in records], dtype=object))
    return [records[index] for index in _latest(pd.Series(things), pd.Series([record.timestamp for record in records]))]


def _latest(thing: pd.Series, timestamp: pd.Series) -> pd.Index:
    """Return the indices of the latest row of each thing; things are numbered in the order in which they come."""
    rows = pd.DataFrame({"thing": thing, "timestamp": timestamp}).sort_values("timestamp", kind="stable")
    return rows.groupby("thing").tail(1).sort_values("thing").index


def other_configurations(frame: pd.DataFrame) -> int:
    """Return how many rows `latest` leaves out that were measured with another configuration than the last."""
    timed = frame[frame.time_us.notna()]
    shown = timed[THING].merge(latest(frame), on=THING, how="left").config
    return int((timed.config.to_numpy() != shown.to_numpy()).sum())


def variants_only(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of variants, without those of yardsticks."""
    return frame[~frame.variant.isin(YARDSTICKS)]


def over(frame: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return the latest rows, their speedups over the row of another variant, or of a yardstick, of the same run.

    A run is known by its time of `library`. `library_us` is then the time of that row, and the speedup the ratio of the
    two; both are NaN where that row has no time in the run.

    Raises:
        ValueError: no row of that name has a time to compare with; says which have.
    """
    shown = latest(frame)
    if baseline == LIBRARY:
        return shown
    timed = shown[shown.library_us.notna() & shown.time_us.notna() & (shown.device != "cpu")]
    if baseline not in set(timed.variant):
        names = ", ".join(timed.variant.unique())
        raise ValueError(
            f"no row of {baseline!r} has a time to compare with; rows that have: {names or 'none'}"
            + ("" if names else " (interpreted times are not performance)")
        )
    run = [*PROBLEM, "library_us"]
    times = timed[timed.variant == baseline].drop_duplicates(run, keep="last")[[*run, "time_us"]]
    baseline_us = shown[run].merge(times, on=run, how="left").time_us.to_numpy()
    return shown.assign(library_us=baseline_us, speedup_vs_library=baseline_us / shown.time_us)


def rows_of(frame: pd.DataFrame) -> list[Any]:
    """Return the rows of a table as tuples, whose fields are named after the columns."""
    return list(frame.itertuples(index=False))


def labels(frame: pd.DataFrame) -> list[str]:
    """Return what each row's problem is called; its family may be one that is not installed here."""
    names = [FAMILIES[family].collective if family in FAMILIES else family for family in frame.family]
    return [problem_label(name, row.m, row.n, row.k) for name, row in zip(names, rows_of(frame), strict=True)]


def geomean(values: pd.Series | Sequence[float]) -> float:
    """Return the geometric mean; NaN of nothing."""
    return float(np.exp(np.log(np.asarray(values, dtype=float)).mean())) if len(values) else float("nan")
