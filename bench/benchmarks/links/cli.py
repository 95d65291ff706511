"""The command ``iris-bench links``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ...command.exits import refuse
from ...command.jobs import Measurement, conclude
from ...command.options import Device, Overwrite, Resume, Seed, WorldSize, numbers
from ...command.outputs import rows_to_go_on_from
from ...command.ranks import choose_setting, find_launcher
from ...measure import environment
from ...records import report
from ...records.csv_rows import Output
from ...records.looks import check_path
from ...records.record import read_as
from ...records.resume import check_burst
from . import rank
from .measured import keep
from .plot import plot_links
from .record import LinkRecord

_MIB = {"cpu": "0.0625", "cuda": "64"}
_ROUNDS = {"cpu": 1, "cuda": 5}
_BURST = {"cpu": 1, "cuda": 10}
_MOST_MIB = 1024.0


def links(
    mib: Annotated[
        str | None,
        typer.Option(
            help="MiB to each peer a call, one or more by commas, rounded to 64 bytes [default: 64; CPU: 1/16]."
        ),
    ] = None,
    world_size: WorldSize = None,
    device: Device = "auto",
    rounds: Annotated[int | None, typer.Option(help="Samples of each [default: 5; CPU: 1].")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Heat maps of the largest size: .png, .svg or .pdf.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure the links alone: stores, loads, atomics and copies between every two ranks, all at once, and barriers.

    What arrives is checked first, and rows are written size by size. Without a GPU the times are the interpreter's, and
    say nothing of any link. What GPUs can send is kept in $IRIS_CACHE_DIR, or ~/.cache/iris-overlap, for the ideal of
    other commands. Exit status: 0, or 1 if anything was wrong or the ranks were lost, or 2 if the command makes no
    sense, or 130 if it was interrupted.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        if plot:
            check_path(plot)
        if plot and world_size == 1:
            raise ValueError("a heat map takes two ranks or more; leave --plot out")
        read = functools.partial(read_as, kind=LinkRecord, speak=is_first)
        done = rows_to_go_on_from(out, plot, read, resume=resume, overwrite=overwrite)
        plans = _plans(mib, rounds, seed, device, world_size, done)
        if plans:
            check_burst(done, device=device, burst=plans[0].burst)
    except ValueError as error:
        refuse(error, speak=is_first)
    output = Output[LinkRecord](out if is_first else None, done, replace=overwrite)
    measurement = Measurement(
        measure=rank.measure,
        to_records=_to_records,
        heap_bytes=lambda plan, ranks: 4 * plan.elements * (ranks + 1) + (1 << 20),
        title=lambda plan: f"{_mib(4 * plan.elements)} to each peer",
        name=lambda row: f"{_mib(row.bytes)} to each peer",
    )
    setting = {"world_size": world_size, "device": device}
    ended_early = measurement.run(plans, output, setting, launcher=launcher, speak=is_first)
    conclude(output, ended_early, [*done, *output.records], show=_show, launcher=launcher, plot=plot, draw=plot_links)


def _show(records: Sequence[LinkRecord]) -> None:
    print_links(report.make_console(), records)
    if kept := keep(records):
        print(f"iris-bench: kept for the ideal of other commands: {kept}", file=sys.stderr)


def _plans(
    mib: str | None, rounds: int | None, seed: int, device: str, world_size: int, done: Sequence[LinkRecord]
) -> list[rank.Plan]:
    """Return what of the sizes that are asked for is not among the rows that are there; flags go with the first."""
    sizes = numbers("--mib", mib or _MIB[device], float, most=_MOST_MIB)
    rounds = _ROUNDS[device] if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"--rounds {rounds} makes no sense; it takes a positive number")
    right = [row for row in done if (row.world_size, row.device, row.status) == (world_size, device, "ok")]
    moved = {row.bytes for row in right if row.kind in rank.PAIRWISE}
    elements = [max(1, round(size * 2**20 / (4 * rank.UNIT))) * rank.UNIT for size in sizes]
    left = [one for one in dict.fromkeys(elements) if world_size > 1 and 4 * one not in moved]
    flags = all(row.kind != "host_barrier" for row in right)
    if flags and not left:
        left = elements[:1]
    return [rank.Plan(one, flags and one == left[0], rounds, _BURST[device], seed) for one in left]


def _to_records(plan: rank.Plan, outcomes: Sequence[rank.Outcome], columns: dict[str, Any]) -> list[LinkRecord]:
    common = columns | {"rounds": plan.rounds, "burst": plan.burst, "seed": plan.seed}
    common["timestamp"] = environment.timestamp()
    return [LinkRecord(**asdict(one), **common, gbps=_rate(one)) for one in outcomes]


def _rate(outcome: rank.Outcome) -> float | None:
    return outcome.bytes / outcome.time_us / 1e3 if outcome.bytes and outcome.time_us else None


def print_links(console: Console, records: Sequence[LinkRecord]) -> None:
    """Print a table of how ranks reach each other, one a pairwise kind and size, then one of the rest."""
    frame = pd.DataFrame(records, columns=[column.name for column in fields(LinkRecord)])
    frame["shown"] = [_gbps(one) for one in records]
    is_pair = frame.kind.isin(rank.PAIRWISE)
    for index, ((kind, _), pairs) in enumerate(frame[is_pair].groupby(["kind", "bytes"], sort=False)):
        if index == 0:
            console.print("how a rank reaches another's memory", _matrix(pairs, "path"))
        # A title would be no wider than the table.
        console.print(f"{kind}, GB/s, {_mib(pairs.bytes.iloc[0])}: {rank.KINDS[str(kind)]}", _matrix(pairs, "shown"))
    rest = [one for one in records if one.kind not in rank.PAIRWISE]
    if rest:
        table = _table("what", "moved", "rank", "peer", "us", "GB/s per rank")
        for one in rest:
            between = ["" if value is None else str(value) for value in (one.from_rank, one.to_rank)]
            us = one.status if one.time_us is None else f"{one.time_us:,.1f}"
            moved, gbps = (_mib(one.bytes), _gbps(one)) if one.bytes else ("", "")
            table.add_row(f"{one.kind}: {rank.KINDS[one.kind]}", moved, *between, us, gbps)
        console.print("the rest", table)


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"


def _matrix(pairs: pd.DataFrame, column: str) -> Table:
    # Of a size measured again the last row counts.
    cells = pairs.pivot_table(index="from_rank", columns="to_rank", values=column, aggfunc="last").fillna("")
    table = _table("rank", *(f"to {peer:g}" for peer in cells.columns))
    for number, row in cells.iterrows():
        table.add_row(f"{number:g}", *row)
    return table


def _gbps(record: LinkRecord) -> str:
    return record.status if record.gbps is None else f"{record.gbps:,.3g}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
