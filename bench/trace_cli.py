"""The command ``iris-bench trace``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from overlap_taxonomy import get_variant, list_variants

from . import plot as plots
from . import sweep, trace_plot
from . import trace as traces
from .exits import refuse
from .measure import Job
from .ranks import LaunchedRanks, Ranks, StartedRanks, choose_device, choose_world_size, count_gpus, find_launcher
from .trace import Traced


def trace(
    family: Annotated[str, typer.Option(help="One family.")],
    variant: Annotated[str, typer.Option(help="One variant of it, made of our kernels.")],
    shape: Annotated[str, typer.Option(help="MxNxK of the whole problem.")],
    out: Annotated[Path, typer.Option(help="JSON file to write, for ui.perfetto.dev or chrome://tracing.")],
    world_size: Annotated[int | None, typer.Option(help="Ranks [default: all GPUs; 4 without].")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu (interpreted) or cuda (NVIDIA or AMD GPUs).")] = "auto",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    plot: Annotated[Path | None, typer.Option(help="Picture to make of it: .png, .svg or .pdf.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random operands.")] = 0,
) -> None:
    """Write down what every program of every rank does in one call, tile by tile: multiply, store, push, wait.

    Exit status: 0, or 2 if the command makes no sense.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        if plot:
            plots.check_path(plot)
        gpus = count_gpus()
        device = choose_device(device, os.environ, gpus)
        world_size = choose_world_size(world_size, device=device, gpus=gpus, launcher=launcher)
        plan = sweep.make_plan(
            families=family,
            variants=variant,
            shapes=shape,
            dtype=dtype,
            device=device,
            world_size=world_size,
            seed=seed,
            rounds=None,
            burst=None,
            timed=False,
            link_gbps=sweep.H200_LINK_GBPS,
        )
        job = _only_job(plan, family, variant)
        for path in (out, plot):
            if path and not path.parent.is_dir():
                raise ValueError(f"{path.parent} is no folder to write {path.name} to")
    except ValueError as error:
        refuse(error, speak=is_first)
    ranks: Ranks = LaunchedRanks(launcher) if launcher else StartedRanks(world_size, device)
    traced: Traced | None = None
    try:
        traced = ranks.call(traces.record, job, plan.heap_bytes, device)
    finally:
        ranks.close(kill=traced is None)
    if is_first:
        traces.write_trace(traced, out)
        if plot:
            trace_plot.plot_trace(traced, plot)
        lost = f"; {traced.lost} spans found no room" if traced.lost else ""
        count = sum(map(len, traced.ranks))
        print(f"{traced.title}: {count} spans, clocks within {traced.accuracy_ns / 1e3:.1f} µs of each other{lost}")


def _only_job(plan: sweep.Plan, family: str, variant: str) -> Job:
    """Return the plan's only job.

    Raises:
        ValueError: there are several, or its variant cannot do it or writes no trace.
    """
    if len(plan.jobs) != 1 or "," in variant or variant == "all":
        raise ValueError("a trace is of one variant on one shape: give one --family, --variant and --shape")
    found = get_variant(family, variant)
    if not getattr(found.build, "can_trace", False):
        able = [one.name for one in list_variants(family) if getattr(one.build, "can_trace", False)]
        raise ValueError(f"{family}/{variant} writes no trace; of this family {', '.join(able)} do")
    if reason := found.unsupported_reason(plan.jobs[0].problem(), None):
        raise ValueError(f"{family}/{variant} cannot do this: {reason}")
    return plan.jobs[0]
