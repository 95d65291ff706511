"""The tables of ``iris-bench decoder``: a line per step, and what was not measured and why."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from iris_kernels.common.calibration.timing import PARTLY_THE_HOSTS

from .record import DecoderRecord
from .systems import IRIS, LIMIT, TORCH

_SHOWN = 300  # characters of a reason; the file has all of them


def step_name(record: DecoderRecord) -> str:
    """Return what a step is called."""
    past = " past" if record.phase == "decode" else ""
    return f"{record.phase} {record.batch}x{record.sequence}{past}"


def model_name(record: DecoderRecord) -> str:
    """Return what a model is called, of so many layers, in its dtype."""
    return f"{record.model}, {record.layers} layers, {record.dtype}"


def best(rows: Sequence[DecoderRecord], systems: Sequence[str]) -> DecoderRecord | None:
    """Return the row with the shortest time of some systems; None where there is none."""
    timed = [one for one in rows if one.system in systems and one.time_us]
    return min(timed, key=lambda one: one.time_us or 0.0, default=None)


def host_mark(*records: DecoderRecord | None) -> str:
    """Return a mark where the GPU waited for the host in a step's time, which another host may make shorter."""
    return " †" if any(f"time_us {PARTLY_THE_HOSTS}" in record.reason for record in records if record) else ""


def between_rounds(theirs: DecoderRecord | None, ours: DecoderRecord | None) -> tuple[float, float] | None:
    """Return the least and the most by which ours is ahead of theirs between any two rounds; None where unknown."""
    if theirs is None or ours is None or not (ours.time_min_us and ours.time_max_us):
        return None
    if not (theirs.time_min_us and theirs.time_max_us):
        return None
    return theirs.time_min_us / ours.time_max_us, theirs.time_max_us / ours.time_min_us


def by_step(records: Sequence[DecoderRecord]) -> dict[Any, list[DecoderRecord]]:
    """Return the rows of each step, on each kind of device."""
    groups: dict[Any, list[DecoderRecord]] = {}
    for record in records:
        groups.setdefault((*record.step_key, record.device_name), []).append(record)
    return groups


def print_decoder(console: Console, records: Sequence[DecoderRecord]) -> None:
    """Print a line per step: the best of torch's systems and of ours in any mode; below, the others' reasons."""
    groups = list(by_step(records).values())
    if not groups:
        return
    first = groups[0][0]
    headline = f"{model_name(first)}, {first.world_size} x {first.device_name}"
    headline += "; checked only" if first.device == "cpu" else ", us per step on the device"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("step")
    for column in ("best of torch", "best of iris", "speedup", "between rounds", "limit / iris", "ok"):
        table.add_column(column, justify="right")
    for rows in groups:
        theirs, ours = best(rows, TORCH), best(rows, IRIS)
        speedup, limit = (ours.speedup_vs_torch, ours.limit_over_time) if ours else (None, None)
        ratios = ["" if value is None else f"{value:.2f}" for value in (speedup, limit)]
        ratios.insert(1, range_of(between_rounds(theirs, ours)))
        checked = [one for one in rows if one.status != "unsupported" and one.system != LIMIT]
        count = f"{sum(one.status == 'ok' for one in checked)} of {len(checked)}"
        table.add_row(step_name(rows[0]), _cell(theirs), _cell(ours), *ratios, count)
    console.print(Text(headline, style="bold"), table)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for one in records:
        if one.reason:
            reasons.setdefault((one.system, one.status, one.reason), []).append(f"{step_name(one)} {one.mode}")
    for (system, status, reason), where in reasons.items():
        places = textwrap.shorten(", ".join(where), 90)
        console.print(Text(f"  {system}, {status}: {textwrap.shorten(reason, _SHOWN)} ({places})"))


def range_of(ends: tuple[float, float] | None) -> str:
    """Return a range of ratios as text; nothing for none."""
    return "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def _cell(record: DecoderRecord | None) -> str:
    return "" if record is None else f"{record.time_us:,.0f} ({record.system}, {record.mode})"
