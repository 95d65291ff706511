"""The command ``iris-bench ccl``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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
from .plot import plot_ccl, speedups
from .record import CclRecord

_SIZES_KIB = {"cpu": "4,16", "cuda": "4,16,64,256,1024,4096,16384,65536,262144"}
_ROUNDS = {"cpu": 1, "cuda": 20}
_BURST = {"cpu": 1, "cuda": 10}
_STAGING_BYTES = 320 << 20


def ccl(
    kib: Annotated[str | None, typer.Option(help="Sizes in KiB [default: 4 to 262144; CPU: 4,16].")] = None,
    kind: Annotated[str | None, typer.Option(help="Collectives, with commas [default: all].")] = None,
    world_size: WorldSize = None,
    device: Device = "auto",
    rounds: Annotated[int | None, typer.Option(help="Samples of each [default: 20; CPU: 1].")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Speedups by size: .png, .svg or .pdf.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure the collectives on whole tensors (ctx.ccl) beside NCCL's or RCCL's, eager and in CUDA graphs.

    What comes is checked first. A size is that of the larger tensor of a rank, in bf16. Without a GPU the times are the
    interpreter's and gloo's, and say nothing. Exit status: 0, or 1 if anything was wrong or the ranks were lost, or 2
    if the command makes no sense.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        if plot:
            check_path(plot)
        plan = _plan(kib, kind, rounds, seed, device)
        check_outputs(("--out", out), ("--plot", plot))
        check_new(("--out", out), overwrite=overwrite)
    except ValueError as error:
        refuse(error, speak=is_first)
    ranks = start_ranks(launcher, world_size, device)
    outcomes: list[rank.Outcome] = []
    columns: dict[str, str] = {}
    console = report.make_console(stderr=True)
    console.quiet = not is_first
    with CommandProgress(console) as progress, ending(ranks) as ended:
        progress.add_task("measuring the collectives", total=None)
        columns = ranks.call(measure.open_rank, 2 * max(plan.sizes) + _STAGING_BYTES, device)
        outcomes = ranks.call(rank.measure, plan)
        ranks.call(measure.close_rank)
    common = {**columns, **environment.versions(), "timestamp": environment.timestamp()}
    run = {"world_size": world_size, "device": device, "rounds": plan.rounds, "burst": plan.burst, "seed": plan.seed}
    records = [CclRecord(**asdict(outcome), **run, **common) for outcome in outcomes]  # type: ignore[arg-type]
    if is_first:
        if out and records:
            append_records(out, records, replace=True)
        if records:
            print_ccl(report.make_console(), records)
        if ended.error:
            complain("the measurement", ended.error)
        elif plot:
            plot_ccl(records, plot)
    failed = any(record.status == "wrong" for record in records)
    leave(failed=failed, lost=ended.error is not None, launcher=launcher)


def _plan(kib: str | None, kind: str | None, rounds: int | None, seed: int, device: str) -> rank.Plan:
    try:
        sizes = tuple(int(float(size) * 1024) for size in (kib or _SIZES_KIB[device]).split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--kib {kib} makes no sense; it takes positive numbers with commas")
    kinds = tuple(kind.split(",")) if kind else rank.KINDS
    if unknown := set(kinds) - set(rank.KINDS):
        raise ValueError(f"--kind {', '.join(sorted(unknown))}: there are {', '.join(rank.KINDS)}")
    rounds = _ROUNDS[device] if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"--rounds {rounds} makes no sense; it takes a positive number")
    return rank.Plan(sizes, kinds, rounds, _BURST[device], seed)


def print_ccl(console: Console, records: list[CclRecord]) -> None:
    """Print a row a collective, mode and size: times, bandwidth, the speedup over torch's backend."""
    other = next((record.library for record in records if record.library != "iris"), "")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("collective", "mode", "bytes", "iris us", f"{other} us", "iris GB/s", "speedup"):
        table.add_column(name, justify="left" if name in ("collective", "mode") else "right")
    rows: list[dict[str, Any]] = speedups(records).to_dict("records")  # type: ignore[assignment]
    for row in rows:
        rate = row["bytes"] / row["iris"] / 1e3
        known = (f"{row['iris']:,.1f}", f"{row['other']:,.1f}", f"{rate:,.3g}", f"{row['speedup']:.2f}")
        table.add_row(row["kind"], row["mode"], f"{row['bytes']:,}", *known)
    console.print(table)
    wrong = sorted({f"{record.kind} of {record.library}" for record in records if record.status == "wrong"})
    if wrong:
        console.print(f"wrong: {', '.join(wrong)}")
