"""The command ``iris-bench norm``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from overlap_taxonomy import get_variant

from ...command.exits import refuse
from ...command.jobs import Measurement, conclude, plain_records
from ...command.options import Device, Overwrite, Resume, Seed, WorldSize
from ...command.outputs import rows_to_go_on_from
from ...command.ranks import choose_setting, find_launcher
from ...measure import environment
from ...measure.families import FAMILIES
from ...measure.shapes import parse_shapes
from ...records import report
from ...records.csv_rows import Output
from ...records.record import read_as
from ...records.resume import check_burst, is_finished
from . import rank
from .others import OTHERS
from .record import NormRecord

_FAMILIES = ("gemm_all_reduce", "gemm_reduce_scatter")
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
_LAYERS = ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))  # o and down of Llama-3-8B and 70B
_SHAPES = {
    "cpu": "9x40x24,33x64x48",
    "cuda": ",".join(f"{m}x{n}x{k}" for n, k in _LAYERS for m in _ROWS),
}
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
_ROUNDS = {"cpu": 1, "cuda": 20}
_BURST = {"cpu": 1, "cuda": 10}
_HEAP_BYTES = 64 << 20  # beside what operators take
_OPERATORS = 2  # of each variant: without a norm, and with one


def norm(
    family: Annotated[str, typer.Option(help="Families, with commas.")] = ",".join(_FAMILIES),
    shapes: Annotated[str | None, typer.Option(help="MxNxK and shape sets, with commas [default: Llama's].")] = None,
    variant: Annotated[str, typer.Option(help="Variants of ours, with commas.")] = "auto",
    normed_dtype: Annotated[str, typer.Option(help="fp8 dtype of normed rows, as torch names it [default: C's].")] = "",
    world_size: WorldSize = None,
    device: Device = "auto",
    rounds: Annotated[int | None, typer.Option(help="Most samples of each [default: 20; CPU: 1].")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure GEMM + collective + residual + RMSNorm in bf16: fused, and with one more kernel behind the collective.

    Eager and in CUDA graphs. What comes is checked first, and rows are written as they come. Baselines are cuBLAS, NCCL
    and a kernel that adds the residual and norms ("library"), a kernel of ours and that one ("unfused"), and kraken's
    and FlashInfer's, where they are installed. Without a GPU the times are the interpreter's and gloo's, and say
    nothing. Exit status: 0, or 1 if anything was wrong or failed or the ranks were lost, 2 if the command makes no
    sense, 130 if it was interrupted, by Ctrl-C or SIGTERM.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        plans = _plans(family, shapes or _SHAPES[device], variant, normed_dtype, rounds, seed, device, world_size)
        read = functools.partial(read_as, kind=NormRecord, speak=is_first)
        done = rows_to_go_on_from(out, None, read, resume=resume, overwrite=overwrite)
        plans = _left(plans, done, device, world_size)
        if plans:
            check_burst(done, device=device, burst=_BURST[device])
    except ValueError as error:
        refuse(error, speak=is_first)
    setting: dict[str, Any] = {"world_size": world_size, "device": device, "burst": _BURST[device], "seed": seed}
    output = Output[NormRecord](out if is_first else None, done, replace=overwrite)
    measurement = Measurement(
        measure=rank.measure,
        to_records=plain_records(NormRecord),
        heap_bytes=_heap_bytes,
        title=lambda plan: f"{plan.family} {plan.shape}",
        name=lambda row: f"{row.family} {row.m}x{row.n}x{row.k}",
        summarise=lambda rows: "; ".join(
            f"{one.way} {one.variant} {one.mode} {report.time_or_status(one.time_us, one.status)}" for one in rows
        ),
    )
    ended_early = measurement.run(plans, output, setting, launcher=launcher, speak=is_first)
    conclude(
        output,
        ended_early,
        [*done, *output.records],
        show=lambda shown: print_norm(report.make_console(), shown),
        launcher=launcher,
    )


def _left(plans: list[rank.Plan], done: Sequence[NormRecord], device: str, world_size: int) -> list[rank.Plan]:
    """Return the problems of which a row is missing, or failed, in any way that is asked for."""
    now = environment.versions()
    had = {
        (row.family, row.m, row.n, row.k, row.normed_dtype, row.way, row.variant)
        for row in done
        if (row.device, row.world_size) == (device, world_size) and is_finished(row, now, timed=False)
    }
    left = []
    for plan in plans:
        problem = (plan.family, plan.shape.m, plan.shape.n, plan.shape.k, plan.normed_dtype)
        if not had >= {(*problem, *way) for way in rank.ways(plan)}:
            left.append(plan)
    return left


def _heap_bytes(plan: rank.Plan, world_size: int) -> int:
    """Return how large a rank's heap must be for a problem's operators, which are there at once."""
    family, shape = FAMILIES[plan.family], plan.shape
    problem = family.problem(m=shape.m, n=shape.n, k=shape.k, world_size=world_size, dtype=torch.bfloat16)
    return _HEAP_BYTES + _OPERATORS * len(plan.variants) * family.heap_bytes(problem)


def _plans(
    family: str,
    shapes: str,
    variant: str,
    normed_dtype: str,
    rounds: int | None,
    seed: int,
    device: str,
    world_size: int,
) -> list[rank.Plan]:
    families, variants = family.split(","), tuple(variant.split(","))
    if unknown := set(families) - set(_FAMILIES):
        raise ValueError(f"--family {', '.join(sorted(unknown))}: there are {', '.join(_FAMILIES)}")
    if normed_dtype and normed_dtype not in _FP8:
        raise ValueError(f"--normed-dtype {normed_dtype}: there are {', '.join(_FP8)}")
    rounds = _ROUNDS[device] if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"--rounds {rounds} makes no sense; it takes a positive number")
    plans = []
    for one in families:
        names = tuple(get_variant(one, name).name for name in variants)
        for shape in parse_shapes(shapes, collective="reduce_scatter", world_size=world_size):
            plans.append(rank.Plan(one, shape, names, normed_dtype, rounds, _BURST[device], seed))
    return plans


def speedups(records: Sequence[NormRecord]) -> pd.DataFrame:
    """Return a row per problem and mode: times in µs, those of ours the best of the variants, and how much faster.

    `over_library` and `over_unfused` say how much faster fused is than the baselines.
    """
    frame = pd.DataFrame([asdict(record) for record in records])
    frame["time_us"] = frame.time_us.astype(float)
    problem = ["family", "m", "n", "k", "mode"]
    table = frame.pivot_table(index=problem, columns="way", values="time_us", aggfunc="min", sort=False, dropna=False)
    table = table.reindex(columns=["library", *OTHERS, "unfused", "fused"])
    return table.assign(
        over_library=table.library / table.fused, over_unfused=table.unfused / table.fused
    ).reset_index()


def print_norm(console: Console, records: Sequence[NormRecord]) -> None:
    """Print a row per problem and mode, and what was wrong."""
    rows = speedups(records)
    table = Table(box=box.SIMPLE_HEAD)
    for name in rows.columns:
        table.add_column(str(name).replace("_", " "), justify="left" if name in ("family", "mode") else "right")
    for row in rows.itertuples(index=False):
        table.add_row(*(_cell(value) for value in row))
    console.print(table)
    said = (f"{one.family} {one.way} {one.variant}: {one.status}, {one.reason}" for one in records if one.reason)
    for line in dict.fromkeys(said):
        console.print(line, markup=False)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if pd.isna(value) else f"{value:,.3g}" if value < 10 else f"{value:,.1f}"
