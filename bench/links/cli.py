"""The command ``iris-bench links``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..command.exits import complain, leave, refuse
from ..command.options import Device, Overwrite, Seed, WorldSize
from ..command.outputs import check_new, check_outputs
from ..command.progress import CommandProgress
from ..command.ranks import choose_setting, ending, find_launcher, start_ranks
from ..measure import environment
from ..measure import job as measure
from ..records import report
from ..records.csv_rows import append_records
from ..records.looks import check_path
from . import rank
from .measured import keep
from .plot import plot_links
from .record import LinkRecord

_MIB = {"cpu": 0.0625, "cuda": 64.0}
_ROUNDS = {"cpu": 1, "cuda": 5}
_BURST = {"cpu": 1, "cuda": 10}
_MOST_MIB = 1024.0


def links(
    mib: Annotated[float | None, typer.Option(help="MiB to each peer a call [default: 64; CPU: 1/16].")] = None,
    world_size: WorldSize = None,
    device: Device = "auto",
    rounds: Annotated[int | None, typer.Option(help="Samples of each [default: 5; CPU: 1].")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Heat maps: .png, .svg or .pdf.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure the links alone: stores, loads, atomics and copies between every two ranks, all at once, and barriers.

    What arrives is checked first. Without a GPU the times are the interpreter's, and say nothing of any link. What GPUs
    can send is kept in $IRIS_CACHE_DIR, or ~/.cache/iris-overlap, for the ideal of other commands. Exit status: 0, or
    1 if anything was wrong or the ranks were lost, or 2 if the command makes no sense.
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
        plan = _plan(mib, rounds, seed, device)
        check_outputs(("--out", out), ("--plot", plot))
        check_new(("--out", out), overwrite=overwrite)
    except ValueError as error:
        refuse(error, speak=is_first)
    ranks = start_ranks(launcher, world_size, device)
    heap_bytes = 4 * plan.elements * (world_size + 1) + (1 << 20)
    outcomes: list[rank.Outcome] = []
    columns: dict[str, str] = {}
    console = report.make_console(stderr=True)
    console.quiet = not is_first
    with CommandProgress(console) as progress, ending(ranks) as ended:
        progress.add_task("measuring the links", total=None)
        columns = ranks.call(measure.open_rank, heap_bytes, device)
        outcomes = ranks.call(rank.measure, plan)
        ranks.call(measure.close_rank)
    common = {**columns, **environment.versions(), "timestamp": environment.timestamp()}
    run = {"world_size": world_size, "device": device, "rounds": plan.rounds, "burst": plan.burst, "seed": plan.seed}
    records = [_record(outcome, run | common) for outcome in outcomes]
    if is_first:
        if out and records:
            append_records(out, records, replace=True)
        print_links(report.make_console(), records)
        if kept := keep(records):
            print(f"iris-bench: kept for the ideal of other commands: {kept}", file=sys.stderr)
        if ended.error:
            complain("the measurement", ended.error)
        elif plot:
            plot_links(records, plot)
    failed = any(record.status != "ok" for record in records)
    leave(failed=failed, lost=ended.error is not None, launcher=launcher)


def _plan(mib: float | None, rounds: int | None, seed: int, device: str) -> rank.Plan:
    mib = _MIB[device] if mib is None else mib
    if not 0 < mib <= _MOST_MIB:
        raise ValueError(f"--mib {mib:g} makes no sense; it takes more than 0 and at most {_MOST_MIB:g}")
    rounds = _ROUNDS[device] if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"--rounds {rounds} makes no sense; it takes a positive number")
    blocks = max(1, round(mib * 2**20 / (4 * rank.BLOCK)))
    return rank.Plan(blocks * rank.BLOCK, rounds, _BURST[device], seed)


def _record(outcome: rank.Outcome, columns: dict[str, object]) -> LinkRecord:
    gbps = outcome.bytes / outcome.time_us / 1e3 if outcome.bytes and outcome.time_us else None
    values: dict[str, object] = {**asdict(outcome), **columns, "gbps": gbps}
    return LinkRecord(**values)  # type: ignore[arg-type]


def print_links(console: Console, records: Sequence[LinkRecord]) -> None:
    """Print a table of how ranks reach each other, one a pairwise kind, then one of the rest."""
    frame = pd.DataFrame(records, columns=[column.name for column in fields(LinkRecord)])
    frame["shown"] = [_gbps(one) for one in records]
    is_pair = frame.kind.isin(rank.PAIRWISE)
    for index, (kind, pairs) in enumerate(frame[is_pair].groupby("kind", sort=False)):
        if index == 0:
            console.print("how a rank reaches another's memory", _matrix(pairs, "path"))
        # A title would be no wider than the table.
        console.print(f"{kind}, GB/s: {rank.KINDS[str(kind)]}", _matrix(pairs, "shown"))
    rest = [one for one in records if one.kind not in rank.PAIRWISE]
    if rest:
        table = _table("what", "rank", "peer", "us", "GB/s a rank")
        for one in rest:
            between = ["" if value is None else str(value) for value in (one.from_rank, one.to_rank)]
            us = one.status if one.time_us is None else f"{one.time_us:,.1f}"
            table.add_row(f"{one.kind}: {rank.KINDS[one.kind]}", *between, us, _gbps(one) if one.bytes else "")
        console.print("the rest", table)


def _matrix(pairs: pd.DataFrame, column: str) -> Table:
    cells = pairs.pivot(index="from_rank", columns="to_rank", values=column).fillna("")
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
