"""The command ``iris-bench trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overlap_taxonomy import get_variant, list_variants

from ..command.exits import complain, leave, refuse
from ..command.options import Device, FastAccum, OperandDtype, Scales, Seed, WorldSize
from ..command.outputs import check_new, check_outputs
from ..command.progress import CommandProgress
from ..command.ranks import Ranks, choose_setting, ending, find_launcher, start_ranks
from ..measure import sweep
from ..measure.job import Job
from ..records import report
from ..records.looks import check_path
from . import plot as trace_plot
from . import traced as traces
from .traced import Traced


def trace(
    family: Annotated[str, typer.Option(help="One family.")],
    variant: Annotated[str, typer.Option(help="One variant of it, of our kernels; or several, separated by commas.")],
    shape: Annotated[str, typer.Option(help="MxNxK of the whole problem.")],
    out: Annotated[Path, typer.Option(help="JSON for ui.perfetto.dev; of several variants OUT-VARIANT.json, each.")],
    world_size: WorldSize = None,
    device: Device = "auto",
    dtype: OperandDtype = "bf16",
    scales: Scales = "",
    fast_accum: FastAccum = False,
    plot: Annotated[
        Path | None, typer.Option(help="Picture: all ranks, or rank 0 of each variant; .png, .svg or .pdf.")
    ] = None,
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT and PLOT.")] = False,
) -> None:
    """Write down what every program of every rank does in one call, tile by tile: multiply, store, push, wait.

    Exit status: 0, or 1 if the ranks were lost, or 2 if the command makes no sense.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        if plot:
            check_path(plot)
        plan = sweep.make_plan(
            families=family,
            variants=variant,
            shapes=shape,
            dtype=dtype,
            scales=scales,
            use_fast_accum=fast_accum,
            device=device,
            world_size=world_size,
            seed=seed,
            rounds=None,
            burst=None,
            timed=False,
        )
        job = _only_job(plan)
        variants = _variants(job, variant)
        files = [out] if len(variants) == 1 else [_file_of(out, name) for name in variants]
        outputs = [*(("--out", file) for file in files), ("--plot", plot)]
        check_outputs(*outputs)
        check_new(*outputs, overwrite=overwrite)
    except ValueError as error:
        refuse(error, speak=is_first)
    ranks = start_ranks(launcher, world_size, device)
    traced, ended_early = _record(ranks, job, variants, plan.heap_bytes, device)
    if is_first:
        if device == "cpu":
            print(report.INTERPRETED)
        for one, file in zip(traced, files, strict=False):  # of a run that ended early, the first
            traces.write_trace(one, file)
            print(_summary(one))
        if ended_early:
            complain("the trace", ended_early)
        elif plot:
            trace_plot.plot_traces(traced, plot, interpreted=device == "cpu")
    leave(failed=False, lost=ended_early is not None, launcher=launcher)


def _record(
    ranks: Ranks, job: Job, variants: list[str], heap_bytes: int, device: str
) -> tuple[list[Traced], Exception | None]:
    """Return the variants' traces, and what ended this early."""
    traced: list[Traced] = []
    console = report.make_console(stderr=True)
    console.quiet = not ranks.is_first
    with CommandProgress(console) as progress, ending(ranks) as ended:
        task = progress.add_task("starting", total=len(variants))
        for variant in variants:
            progress.update(task, description=f"tracing {variant}")
            traced.append(ranks.call(traces.record, job, variant, heap_bytes, device))
            progress.advance(task)
    return traced, ended.error


def _summary(traced: Traced) -> str:
    lost = f"; {traced.lost} spans found no room" if traced.lost else ""
    clocks = f"clocks within {traced.accuracy_ns / 1e3:.1f} µs of each other"
    return f"{traced.title}: {sum(map(len, traced.ranks))} spans in {traced.total_us:.0f} µs, {clocks}{lost}"


def _file_of(out: Path, variant: str) -> Path:
    """Return where one of several variants is written to; a colon is no letter of a file's name everywhere."""
    return out.with_stem(f"{out.stem}-{variant.replace(':', '_')}")


def _only_job(plan: sweep.Plan) -> Job:
    """Return the plan's only job; ValueError if there are several."""
    if len(plan.jobs) != 1:
        raise ValueError("a trace is of one problem: give one --family and one --shape")
    return plan.jobs[0]


def _variants(job: Job, text: str) -> list[str]:
    """Return the variants to trace; "all" are those of the family that can.

    Raises:
        ValueError: one cannot do the problem, or writes no trace.
    """
    able = [one.name for one in list_variants(job.family) if one.can_trace]
    if text == "all":
        return [name for name in able if not get_variant(job.family, name).unsupported_reason(job.problem(), None)]
    names = list(sweep.select_variants([job.family], text)[job.family])
    for name in names:
        if name not in able:
            raise ValueError(f"{job.family}/{name} writes no trace; of this family {', '.join(able)} do")
        if reason := get_variant(job.family, name).unsupported_reason(job.problem(), None):
            raise ValueError(f"{job.family}/{name} cannot do this: {reason}")
    return names
