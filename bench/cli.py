"""The command ``iris-bench``: list, run, table, plot; the others are in folders of their own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from overlap_taxonomy import list_families

from .benchmarks.ccl.cli import ccl
from .benchmarks.decoder.cli import decoder
from .benchmarks.host.cli import host
from .benchmarks.layers.cli import layers
from .benchmarks.links.cli import links
from .benchmarks.norm.cli import norm
from .command.env import env
from .command.exits import complain, heed_termination, interrupted, leave, refuse, warn
from .command.options import (
    Device,
    FastAccum,
    Hosts,
    Names,
    OperandDtype,
    Over,
    Overwrite,
    Resume,
    Scales,
    Seed,
    Shapes,
    WorldSize,
)
from .command.outputs import UnwritableError, check_different, check_outputs, left_over, rows_to_go_on_from
from .command.progress import CommandProgress
from .command.ranks import Ranks, check_hosts, choose_setting, ending, find_launcher, start_ranks
from .correctness.check.cli import check
from .correctness.litmus.cli import litmus
from .correctness.memcheck.cli import memcheck
from .correctness.stress.cli import stress
from .measure import sweep
from .measure.job import Job
from .measure.sweep import select_families
from .records import frames, report
from .records import plot as plots
from .records.looks import check_path
from .records.record import LIBRARY, Record, read_records
from .records.resume import differences
from .report.cli import make_report
from .suite.cli import measure_everything
from .trace.cli import trace
from .tune.calibrate_cli import calibrate_machine
from .tune.cli import defaults, tune
from .tune.explain_cli import explain_choice
from .tune.grid_cli import write_predictions
from .tune.model_cli import model

app = typer.Typer(
    help="Measure GEMMs fused with collectives against NCCL + cuBLAS (RCCL + hipBLASLt).",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command("measure")(measure_everything)
app.command()(check)
app.command()(stress)
app.command()(memcheck)
app.command()(model)
app.command("explain")(explain_choice)
app.command()(tune)
app.command("calibrate")(calibrate_machine)
app.command()(defaults)
app.command()(trace)
app.command()(links)
app.command()(ccl)
app.command()(norm)
app.command()(host)
app.command()(litmus)
app.command()(layers)
app.command()(decoder)
app.command("report")(make_report)
app.command("predictions")(write_predictions)
app.command()(env)

_SLOW_INTERPRETED_FLOPS = 1 << 30


@app.command("list")
def list_all() -> None:
    """Show the families, their variants, and the shape sets."""
    report.print_families(report.make_console())


@app.command()
def run(
    family: Names = "all",
    variant: Annotated[str, typer.Option(help="'all', or names or patterns, by commas; library always runs.")] = "all",
    shapes: Shapes = "smoke",
    every: Annotated[int, typer.Option(help="Of the shapes in order of M, measure each N-th.", metavar="N")] = 1,
    world_size: WorldSize = None,
    hosts: Hosts = 1,
    device: Device = "auto",
    dtype: OperandDtype = "bf16",
    scales: Scales = "",
    fast_accum: FastAccum = False,
    out: Annotated[Path | None, typer.Option(help="CSV file to write, a row per variant and shape.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to make of it: .png, .svg or .pdf.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Samples a variant [default: 20; 1 on a CPU].")] = None,
    burst: Annotated[int | None, typer.Option(help="Calls back to back in a sample [default: 10; 1 on a CPU].")] = None,
    seed: Seed = 0,
    link_gbps: Annotated[
        float | None,
        typer.Option(help="What a GPU can send, in GB/s, for 'ideal' [default: what iris-bench links measured here]."),
    ] = None,
    epilogue: Annotated[str, typer.Option(help="Ops applied to C, by commas, such as bias,gelu [default: none].")] = "",
    time: Annotated[bool, typer.Option("--time/--no-time", help="Time what is correct, or check only.")] = True,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Check every variant on every shape, then time those that are right.

    Exit status: 0, or 1 if a variant was wrong or failed, or 2 if the command makes no sense, or 130 if it was
    interrupted. Under torchrun or mpirun each process is a rank; otherwise the ranks are started here.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher, timed=time)
        check_hosts(hosts, world_size, launcher)
        if plot:
            check_path(plot)
        read = functools.partial(read_records, speak=is_first)
        done = rows_to_go_on_from(out, plot, read, resume=resume, overwrite=overwrite)
        plan = sweep.make_plan(
            families=family,
            variants=variant,
            shapes=shapes,
            dtype=dtype,
            device=device,
            world_size=world_size,
            seed=seed,
            rounds=rounds,
            burst=burst,
            timed=time,
            link_gbps=link_gbps,
            epilogue=epilogue,
            scales=scales,
            use_fast_accum=fast_accum,
            step=every,
            hosts=hosts,
            done=done,
        )
    except ValueError as error:
        refuse(error, speak=is_first)
    if is_first and plan.jobs and (others := _differences(plan, done)):
        warn(f"{out} was not made as the rows to come are: it has {others}")
    output = sweep.Output(out if is_first else None, done, timed=time, replace=overwrite)
    ended_early = None
    if plan.jobs:
        try:
            ranks = start_ranks(launcher, world_size, device, hosts)
            ended_early = _run_shown(plan, ranks, output)
        except KeyboardInterrupt:
            count = len(output.records) - len(done)
            left = left_over(output.path, count, is_there=output.is_there, overwrite=overwrite)
            interrupted(left, launcher=launcher, speak=is_first)
    if is_first:
        _show(output, plot, ended_early)
    failed = any(record.status in ("wrong", "error") for record in output.records[len(done) :])
    leave(failed=failed, lost=ended_early is not None, launcher=launcher)


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="CSVs that run wrote.")],
    family: Annotated[str, typer.Option(help="'all', or names separated by commas.")] = "all",
    over: Over = LIBRARY,
) -> None:
    """Print the tables of CSVs, of each thing measured the last row that any of them has."""
    try:
        rows = _shown(files, over, None if family == "all" else select_families(family))
        if rows.empty:
            of_family = "" if family == "all" else f" of {family}"
            raise ValueError(f"there are no rows{of_family} in {', '.join(map(str, files))} to print")
    except ValueError as error:
        refuse(error)
    report.print_frame(report.make_console(), rows, over)


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="A CSV that run wrote.")],
    out: Annotated[Path, typer.Option(help="Picture to make: .png, .svg or .pdf.")],
    over: Over = LIBRARY,
) -> None:
    """Plot a CSV: speedup over the library, or, without a GPU, interpreted time."""
    try:
        check_path(out)
        check_different(("FILE", file), ("--out", out))
        rows = _shown([file], over)
        check_outputs(("--out", out))
        plots.plot_frame(rows, out, over)
    except ValueError as error:
        refuse(error)


def _shown(files: Sequence[Path], over: str, families: Sequence[str] | None = None) -> pd.DataFrame:
    """Return the rows of files, the last of each thing measured, with their speedups over a baseline.

    Args:
        files: CSVs.
        over: the baseline.
        families: whose rows; None for all.
    """
    frame = pd.concat([frames.to_frame(read_records(file)) for file in files], ignore_index=True)
    if families is not None:
        frame = frame[frame.family.isin(families)].reset_index(drop=True)
    if left_out := frames.other_configurations(frame):
        named = f"{files[0]} has" if len(files) == 1 else f"these {len(files)} CSVs have"
        warn(f"{named} {left_out} rows more of what is shown, with other configurations; they are not shown")
    return frames.over(frame, over)


def main() -> None:
    """Run the command line."""
    heed_termination()
    try:
        list_families()
    except (ImportError, ValueError) as error:
        sys.exit(f"iris-bench: {error}")
    try:
        app(prog_name="iris-bench")
    except UnwritableError as error:
        sys.exit(f"iris-bench: {error}")


def _differences(plan: sweep.Plan, done: list[Record]) -> str:
    job = plan.jobs[0]
    of_times: dict[str, Any] = {"rounds": job.rounds} if job.timed else {}
    if job.timed and plan.link_gbps:
        of_times["link_gbps"] = plan.link_gbps
    return differences(done, device=plan.device, timed=job.timed, seed=job.seed, **of_times)


def _run_shown(plan: sweep.Plan, ranks: Ranks, output: sweep.Output) -> Exception | None:
    """Run a plan, its progress on standard error; where that is no terminal also a line per problem."""
    console = report.make_console(stderr=True)
    if not ranks.is_first:
        console.quiet = True
    with CommandProgress(console) as progress:
        task = progress.add_task("starting", total=len(plan.jobs))

        def say(index: int) -> None:
            if index < len(plan.jobs):
                job = plan.jobs[index]
                progress.update(task, completed=index, description=f"{job.family} {job.shape}")
                if plan.device == "cpu" and job.problem().flops > _SLOW_INTERPRETED_FLOPS:
                    console.print(f"{job.shape} is large for interpreted kernels, which take hours for such a shape")

        def keep(job: Job, records: list[Record]) -> None:
            output.add(records)
            index = plan.jobs.index(job) + 1
            if not console.is_terminal:
                counts = report.summarise(records)
                console.print(f"[{index}/{len(plan.jobs)}] {job.family} {job.shape}: {counts}", markup=False)
            say(index)

        say(0)
        with ending(ranks) as ended:
            sweep.run(plan, ranks, keep)
    return ended.error


def _show(output: sweep.Output, plot: Path | None, ended_early: Exception | None) -> None:
    report.print_records(report.make_console(), output.records)
    console = report.make_console(stderr=True)
    if plot and output.records:
        plots.plot_records(output.records, plot)
    made = (output.path if output.is_there else None, plot if output.records else None)
    written = [str(path) for path in made if path]
    where = f"; written: {', '.join(written)}" if written else ""
    console.print(report.summarise(frames.latest_records(output.records)) + where, soft_wrap=True, markup=False)
    if ended_early is not None:
        complain("the sweep", ended_early)
