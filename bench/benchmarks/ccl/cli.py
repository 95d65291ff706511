"""The command ``iris-bench ccl``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from iris_core.collectives.config import AUTO, VARIANTS

from ...command.exits import refuse
from ...command.jobs import Measurement, conclude, plain_records
from ...command.options import Device, Overwrite, Resume, Seed, WorldSize, numbers
from ...command.outputs import rows_to_go_on_from
from ...command.ranks import choose_setting, find_launcher
from ...measure import environment
from ...records import report
from ...records.csv_rows import Output
from ...records.looks import check_path
from ...records.record import read_as
from ...records.resume import check_burst, is_finished
from . import rank
from .plot import plot_ccl, speedups
from .record import CclRecord, Outcome

_SIZES_KIB = {"cpu": "4,16", "cuda": "4,64,256,1024,4096,16384,65536,262144"}
_ROUNDS = {"cpu": 1, "cuda": 20}
_BURST = {"cpu": 1, "cuda": 10}
_STAGING_BYTES = 320 << 20


def ccl(
    kib: Annotated[str | None, typer.Option(help="Sizes in KiB [default: 4 to 262144; CPU: 4,16].")] = None,
    kind: Annotated[str | None, typer.Option(help="Collectives, with commas [default: all].")] = None,
    variant: Annotated[str | None, typer.Option(help="Variants of iris, with commas [default: auto].")] = None,
    comm_sms: Annotated[str | None, typer.Option(help="Most programs of iris, with commas [default: its own].")] = None,
    world_size: WorldSize = None,
    device: Device = "auto",
    rounds: Annotated[int | None, typer.Option(help="Most samples of each [default: 20; CPU: 1].")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Speedups by size: .png, .svg or .pdf.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure the collectives on whole tensors (ctx.ccl) beside NCCL's or RCCL's, eager and in CUDA graphs.

    What comes is checked first, and rows are written as they come. A size is that of the larger tensor of a rank, in
    bf16. A collective is measured by those of the variants that it has: one_shot, two_shot and ring are all-reduce's,
    pipelined is reduce-scatter's, `all` is each of them. Without a GPU the times are the interpreter's and gloo's, and
    say nothing. Exit status: 0, or 1 if anything was wrong or failed or the ranks were lost, 2 if the command makes no
    sense, 130 if it was interrupted, by Ctrl-C or SIGTERM.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        if plot:
            check_path(plot)
        plan = _plan(kib, kind, variant, comm_sms, rounds, seed, device)
        read = functools.partial(read_as, kind=CclRecord, speak=is_first)
        done = rows_to_go_on_from(out, plot, read, resume=resume, overwrite=overwrite)
        plans = _left(plan, done, device, world_size)
        if plans:
            check_burst(done, device=device, burst=plan.burst)
    except ValueError as error:
        refuse(error, speak=is_first)
    setting: dict[str, Any] = {"world_size": world_size, "device": device, "burst": plan.burst, "seed": plan.seed}
    output = Output[CclRecord](out if is_first else None, done, replace=overwrite)
    measurement = Measurement(
        measure=rank.measure,
        to_records=plain_records(CclRecord),
        heap_bytes=lambda one, _: 2 * max(one.sizes) + _STAGING_BYTES,
        title=lambda one: _describe(one.kinds[0], one.sizes[0]),
        name=lambda row: _describe(row.kind, row.bytes),
        summarise=lambda rows: "; ".join(
            f"{_way(one)} {one.mode} {report.time_or_status(one.time_us, one.status)}" for one in rows
        ),
    )
    ended_early = measurement.run(plans, output, setting, launcher=launcher, speak=is_first)
    conclude(
        output,
        ended_early,
        [*done, *output.records],
        show=lambda shown: print_ccl(report.make_console(), shown),
        launcher=launcher,
        plot=plot,
        draw=plot_ccl,
    )


def _left(plan: rank.Plan, done: Sequence[CclRecord], device: str, world_size: int) -> list[rank.Plan]:
    """Return a plan for each collective and size of which a row is missing, or failed, in any way that is asked for."""
    now = environment.versions()
    had = {
        (row.kind, row.bytes, row.library == "iris", row.variant, row.comm_sms)
        for row in done
        if (row.device, row.world_size) == (device, world_size) and is_finished(row, now, timed=False)
    }
    left = []
    for kind in plan.kinds:
        ways = {(True, variant, programs) for variant in plan.variants_of(kind) for programs in plan.comm_sms}
        ways.add((False, "", None))
        for size in plan.sizes:
            nbytes = rank.bytes_of(size, world_size)
            if not had >= {(kind, nbytes, *way) for way in ways}:
                left.append(replace(plan, kinds=(kind,), sizes=(size,)))
    return left


def _describe(kind: str, size: int) -> str:
    return f"{kind} of {size / 1024:g} KiB"


def _way(outcome: Outcome) -> str:
    chosen = [str(one) for one in (outcome.variant, outcome.comm_sms) if one not in ("", AUTO, None)]
    return " ".join([outcome.library, *chosen])


def _plan(
    kib: str | None,
    kind: str | None,
    variant: str | None,
    comm_sms: str | None,
    rounds: int | None,
    seed: int,
    device: str,
) -> rank.Plan:
    sizes = tuple(int(size * 1024) for size in numbers("--kib", kib or _SIZES_KIB[device], float))
    kinds = tuple(kind.split(",")) if kind else rank.KINDS
    if unknown := set(kinds) - set(rank.KINDS):
        raise ValueError(f"--kind {', '.join(sorted(unknown))}: there are {', '.join(rank.KINDS)}")
    known = dict.fromkeys(name for names in VARIANTS.values() for name in names)
    variants = tuple(known) if variant == "all" else tuple((variant or AUTO).split(","))
    if unknown := set(variants) - set(known):
        raise ValueError(f"--variant {', '.join(sorted(unknown))}: there are all, {', '.join(known)}")
    programs = numbers("--comm-sms", comm_sms, int) if comm_sms else (None,)
    rounds = _ROUNDS[device] if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"--rounds {rounds} makes no sense; it takes a positive number")
    plan = rank.Plan(sizes, kinds, rounds, _BURST[device], seed, variants, programs)
    if without := [one for one in kinds if not plan.variants_of(one)]:
        raise ValueError(
            f"--variant {variant}: {without[0]} has none of them, but {', '.join(VARIANTS.get(without[0], (AUTO,)))}"
        )
    return plan


def print_ccl(console: Console, records: Sequence[CclRecord]) -> None:
    """Print a row a collective and size: in each mode both libraries' times in µs, and the speedup over torch's."""
    other = next((record.library for record in records if record.library != "iris"), "")
    rows: list[dict[str, Any]] = speedups(records).to_dict("records")  # type: ignore[assignment]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("collective")
    for name in ("KiB", *(f"{mode} {what}" for mode in modes for what in ("iris", other, "speedup"))):
        table.add_column(name, justify="right")
    by_problem: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        by_problem.setdefault((row["way"], row["bytes"]), {})[row["mode"]] = row
    for (way, size), by_mode in by_problem.items():
        cells = [_number(by_mode[mode][what]) for mode in modes for what in ("iris", "other", "speedup")]
        table.add_row(way, f"{size / 1024:g}", *cells)
    console.print(table)
    for reason in dict.fromkeys(
        f"{one.kind} of {_way(one)}: {one.status}, {one.reason}" for one in records if one.reason
    ):
        console.print(reason, markup=False)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.3g}" if value < 10 else f"{value:,.1f}"
