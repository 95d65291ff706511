"""The command ``iris-bench layers``."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...command.exits import refuse, warn
from ...command.jobs import Measurement, conclude
from ...command.options import Device, Overwrite, Resume, Seed, WorldSize, select
from ...command.outputs import rows_to_go_on_from
from ...command.ranks import choose_setting, find_launcher
from ...records import report
from ...records.csv_rows import Output
from ...records.frames import latest_records
from ...records.looks import check_path
from ...records.record import read_as
from ...records.resume import check_burst, differences
from . import rank
from .plan import heap_bytes, plan, still_to_do, to_records
from .plot import plot_layers
from .record import LayersRecord
from .subjects import LAYOUTS, SUBJECTS

_BLOCKS = {"cpu": "16x16x32", "cuda": "8192x4096x14336,8192x8192x28672,2048x8192x28672,64x8192x28672"}
_DTYPES = {"cpu": "fp32", "cuda": "bf16"}
_ROUNDS = {"cpu": 1, "cuda": 8}
_BURST = {"cpu": 1, "cuda": 10}
_SHOWN = 300  # characters of a reason; the file has all of them


def layers(
    blocks: Annotated[
        str | None, typer.Option(help="TOKENSxWIDTHxFEATURES, separated by commas [default: four; CPU: 16x16x32].")
    ] = None,
    subject: Annotated[str, typer.Option(help=f"'all', or some of {', '.join(SUBJECTS)}.")] = "all",
    layout: Annotated[str, typer.Option(help=f"'all', or some of {', '.join(LAYOUTS)}.")] = "all",
    phase: Annotated[str, typer.Option(help=f"'all', or some of {', '.join(rank.PHASES)}.")] = "all",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 [default: bf16; CPU: fp32].")] = None,
    world_size: WorldSize = None,
    device: Device = "auto",
    rounds: Annotated[int | None, typer.Option(help="Samples of each [default: 8; CPU: 1].")] = None,
    burst: Annotated[int | None, typer.Option(help="Calls back to back in a sample [default: 10; CPU: 1].")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to make: .png, .svg or .pdf.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure pairs of tensor-parallel layers beside torch's own: the forward pass, and a step with all gradients.

    Outputs and gradients are checked against the whole layers first. Without a GPU the times are the interpreter's,
    and are not performance. Exit status: 0, or 1 if anything was wrong or failed, or the ranks were lost, or 2 if the
    command makes no sense, or 130 if it was interrupted.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        dtype = dtype or _DTYPES[device]
        jobs = plan(
            blocks=blocks or _BLOCKS[device],
            subjects=select(subject, "--subject", tuple(SUBJECTS)),
            layouts=select(layout, "--layout", LAYOUTS),
            phases=select(phase, "--phase", rank.PHASES),
            dtype=dtype,
            rounds=_ROUNDS[device] if rounds is None else rounds,
            burst=_BURST[device] if burst is None else burst,
            seed=seed,
            world_size=world_size,
        )
        if plot:
            check_path(plot)
            if "torch" not in jobs[0].subjects:
                raise ValueError("--plot shows speedups over torch; --subject leaves it out")
        read = functools.partial(read_as, kind=LayersRecord, speak=is_first)
        done = rows_to_go_on_from(out, plot, read, resume=resume, overwrite=overwrite)
        setting = {"world_size": world_size, "device": device}
        to_do = still_to_do(jobs, done, setting)
        if to_do:
            check_burst(done, device=device, burst=jobs[0].burst)
    except ValueError as error:
        refuse(error, speak=is_first)
    others = differences(done, device=device, timed=True, rounds=jobs[0].rounds, seed=seed) if to_do else ""
    if is_first and others:
        warn(f"{out} was not made as the rows to come are: it has {others}")
    output: Output[LayersRecord] = Output(out if is_first else None, done, replace=overwrite)
    measurement = Measurement(
        measure=rank.measure,
        not_begun=rank.not_begun,
        to_records=to_records,
        heap_bytes=heap_bytes,
        title=lambda job: f"layers {job.tokens}x{job.width}x{job.features}, {job.layout}",
        name=_describe,
    )
    ended_early = measurement.run(to_do, output, setting, launcher=launcher, speak=is_first)
    alike = {"dtype": dtype, **setting}
    rows = latest_records([*done, *output.records])
    conclude(
        output,
        ended_early,
        [row for row in rows if all(getattr(row, name) == value for name, value in alike.items())],
        show=lambda shown: print_layers(report.make_console(), shown),
        plot=plot,
        draw=plot_layers,
        launcher=launcher,
    )


def _describe(record: LayersRecord) -> str:
    return f"{record.tokens} tokens, {record.width} to {record.features} and back, {record.layout}"


def print_layers(console: Console, records: Sequence[LayersRecord]) -> None:
    """Print a table for each pair, phase and device, of all its subjects."""
    places = {name: number for number, name in enumerate(SUBJECTS)}
    groups: dict[Any, list[LayersRecord]] = {}
    for record in records:
        groups.setdefault((*record.pair_key, record.device_name, record.phase), []).append(record)
    for group in groups.values():
        rows = sorted(group, key=lambda one: places.get(one.subject, len(places)))
        first = rows[0]
        where = f"{first.dtype}, {first.world_size} x {first.device_name}"
        if first.device == "cpu":
            where += f"; {report.INTERPRETED}"
        headline = f"{_describe(first)}, {first.phase}, {where}"
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("subject")
        for column in ("time us", "latency us", "host us", "over torch", "error"):
            table.add_column(column, justify="right")
        for one in rows:
            times = (one.time_us, one.latency_us, one.host_us)
            cells = ["" if value is None else f"{value:,.1f}" for value in times]
            over = "" if one.speedup_vs_torch is None else f"{one.speedup_vs_torch:.2f}"
            error = one.status if one.error is None or one.status != "ok" else f"{one.error:.1e}"
            table.add_row(one.subject, *cells, over, error)
        console.print(Text(headline, style="bold"), table)
        for one in rows:
            if one.reason:
                console.print(Text(f"  {one.subject}: {textwrap.shorten(one.reason, _SHOWN)}"))
