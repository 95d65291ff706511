"""From rows of sweeps to what the model is compared with, and to tables of measured times."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pandas as pd

from iris_kernels.common.choice import measured
from iris_kernels.common.choice.auto import NAME as AUTO
from iris_kernels.common.choice.measured import Key, Measured, Table
from overlap_taxonomy import (
    Arrangement,
    Machine,
    Variant,
    Work,
    copies_operands,
    current_name,
    list_variants,
    machine_for,
)
from overlap_taxonomy.fit import Measurement

from ..records import frames
from ..records.record import COMMUNICATION_ALONE, LIBRARY, OPERAND_DTYPES, YARDSTICKS, Record

# What follows from clocks between two runs, at most: a tenth was seen (docs/performance.md). A host that held up the
# calls of `library` made it four times as much: 31 us in one run and 117 in another.
CLOCKS_DIFFER = 1.25
# Calls of a burst from which on times are compared with those of longer bursts. A burst's first call takes 3 us more
# than the next ones, and 1 to 7 in nine of ten rows of results/: in bursts of 4 rather than 10 each call takes 0.5 us
# more, 2 % of the shortest.
LONG_BURST = 4


def measurements(records: Iterable[Record], machine: Machine) -> list[Measurement]:
    """Return the times that were measured on a machine, those of the GEMM alone among them.

    Raises:
        ValueError: times of bursts too short to compare.
    """
    rows = frames.rows_of(frames.latest(_timed(records, besides=(COMMUNICATION_ALONE,))))
    here = [row for row in rows if machine.has(row.device_name) and row.world_size == machine.world_size]
    return [Measurement(row.variant, work_of(row), row.time_us) for row in here]


def tables(records: Iterable[Record], *, with_auto: bool = False) -> dict[str, Table]:
    """Return a table of times for each kind of GPU; of what was measured twice, the later time.

    Where a problem's times are of several runs, they are as if `library` had taken in each what it took in the last: a
    GPU that is cool, or another one, is faster by several percent. A run in which `library` took more than a quarter
    longer than in another is none to compare with: no GPU is so much slower than another of its kind, the host was
    late. Other times of that run are taken as they are. Problems are left out for which `library`, or any variant of
    this project, is not among them: there is nothing to choose by.

    Args:
        records: the rows.
        with_auto: whether `auto` has a time of its own beside those of the variants it chooses from.

    Raises:
        ValueError: times of several bursts, some of them shorter than `LONG_BURST`.
    """
    timed = _timed(records)
    least = timed.groupby(frames.PROBLEM).library_us.transform("min")
    timed["is_in_time"] = timed.library_us <= CLOCKS_DIFFER * least
    rows = frames.latest(timed[(timed.variant != LIBRARY) | timed.is_in_time])
    named = pd.MultiIndex.from_frame(rows[["family", "variant"]])
    rows["is_ours"] = named.isin([(one.family, one.name) for one in list_variants() if one.has_kernels])
    left_out = [one for one in list_variants() if _is_left_out(one) and not (with_auto and one.pattern == AUTO)]
    retired = [(one.family, name) for one in list_variants() for name in one.retired]
    rows = rows[~named.isin([*((one.family, one.name) for one in left_out), *retired])]
    made: dict[str, Table] = {gpu: {} for gpu in rows.device_name.unique()}
    library = rows[rows.variant == LIBRARY].set_index(frames.PROBLEM).time_us.rename("last_library_us")
    rows = rows.join(library, on=frames.PROBLEM, how="inner")
    ratio = (rows.last_library_us / rows.library_us).where(rows.is_in_time, 1.0)
    rows["time_us"] *= ratio
    rows = rows[rows.groupby(frames.PROBLEM).is_ours.transform("any")]
    firsts = frames.rows_of(rows.drop_duplicates(frames.PROBLEM))
    for first, (_, problem) in zip(firsts, rows.groupby(frames.PROBLEM, sort=False), strict=True):
        times = dict(zip(problem.variant, problem.time_us, strict=True))
        made[first.device_name][key_of(first)] = Measured(times)
    return made


def _with_what_auto_took(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows, and of `auto` also as the variant that its configuration names, where that has none."""
    took = rows[(rows.variant == AUTO) & (rows.status == "ok") & rows.config.str.startswith(f"{AUTO}: ", na=False)]
    names = [config.split()[1] for config in took.config]
    took = took.assign(variant=[*map(current_name, took.family, names)])
    is_measured = pd.MultiIndex.from_frame(took[frames.THING]).isin(pd.MultiIndex.from_frame(rows[frames.THING]))
    return pd.concat([rows, took[~is_measured]], ignore_index=True)


def _is_left_out(variant: Variant) -> bool:
    """Whether no table has a variant: `auto` itself, and other projects' operators, which it never chooses."""
    return variant.delegates or variant.arrangement is Arrangement.OTHERS


def _timed(records: Iterable[Record], besides: Collection[str] = YARDSTICKS) -> pd.DataFrame:
    """Return the rows with a time of a GPU's that stands for what the variant is today; none of what failed since.

    Rows of no variant that are named in `besides` are left out. A time of `auto` is also one of the variant that it
    took, where that has none of its own.
    """
    frame = frames.to_frame(records)
    frame = frame[~frame.variant.isin(besides)]
    frame = _with_what_auto_took(frame[frame.device == "cuda"])
    last = frames.latest(frame).set_index(frames.THING).status
    has_time = (frame.status == "ok") & frame.time_us.notna()
    is_ok_today = last.reindex(pd.MultiIndex.from_frame(frame[frames.THING])).eq("ok").to_numpy()
    timed = frame[has_time & is_ok_today]
    timed = timed[np.array([not _is_outdated(row) for row in frames.rows_of(timed)], dtype=bool)].copy()
    if timed.empty:
        raise ValueError("the CSVs have no time of a GPU: no row of a variant is ok, and has device cuda")
    if len(bursts := sorted(timed.burst.unique())) > 1 and bursts[0] < LONG_BURST:
        found = ", ".join(map(str, bursts))
        raise ValueError(f"the CSVs have times of bursts of {found}, which are not to be compared with each other")
    return timed


def _is_outdated(row: Any) -> bool:
    """Whether a row is of a kernel that read operands through pointers which are copied first today.

    Its configuration is rank 0's: today it speaks of pointers for a rank without operands alone.
    """
    machine = machine_for(row.device_name, row.world_size)
    copies = machine and copies_operands(machine, row.variant, work_of(row))
    return bool(copies) and " pointers" in row.config


def key_of(row: Any) -> Key:
    """Return what a row's time is found by in a table."""
    dtype = "-".join(filter(None, (OPERAND_DTYPES[row.dtype], row.scales)))
    return Key(row.family, row.m, row.n, row.k, row.world_size, dtype)


def work_of(row: Any) -> Work:
    """Return the problem of a row as the cost model sees it."""
    return measured.work_of(key_of(row))
