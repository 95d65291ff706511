"""The command ``iris-bench host``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_taxonomy import get_variant

from ...command.exits import refuse
from ...command.jobs import Measurement, conclude, plain_records
from ...command.options import Device, Overwrite, Resume, Seed, WorldSize
from ...command.outputs import rows_to_go_on_from
from ...command.ranks import choose_setting, find_launcher
from ...measure import environment
from ...measure.families import FAMILIES
from ...measure.shapes import Shape, parse_shapes
from ...records import report
from ...records.csv_rows import Output
from ...records.record import read_as
from ...records.resume import is_finished
from . import rank
from .record import HostRecord
from .ways import LAYERS, WAYS, kinds_of, name_of

_SHAPES = {"cpu": "64x32x32", "cuda": "4096x4096x4096"}
_ROUNDS = {"cpu": 1, "cuda": 20}
_BURST = {"cpu": 2, "cuda": 50}
_SINGLES_A_ROUND = {"cpu": 1, "cuda": 4}
_PROFILED = {"cpu": 10, "cuda": 1000}
_HEAP_BYTES = 64 << 20  # beside what operators take
_OPERATORS = 4  # variants that `auto` may take for other numbers of rows


def host(
    family: Annotated[str, typer.Option(help="Families, with commas.")] = "gemm_reduce_scatter,all_gather_gemm",
    shapes: Annotated[
        str | None, typer.Option(help="MxNxK and shape sets, with commas [default: 4096x4096x4096; CPU: 64x32x32].")
    ] = None,
    variant: Annotated[str, typer.Option(help="One that all families have.")] = "auto",
    profile: Annotated[Path | None, typer.Option(help="Folder to write a profile of each way to.")] = None,
    world_size: WorldSize = None,
    device: Device = "auto",
    rounds: Annotated[int | None, typer.Option(help="Bursts of each [default: 20; CPU: 1].")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure what queueing a call takes the host, by layer of software and kind of call, in bf16.

    Ways to call are torch.mm for comparison, the operator, the family's function, the torch op and the layer, and the
    last two in graphs of torch.compile. Calls are repeated in bursts, or made one by one: the same again, also with the
    host's caches written over between calls, with another number of rows, with another weight. What comes is checked
    first, and rows are written as they come; all ranks make the calls, and times are by rank 0's clock. With --profile
    it also writes what cProfile says of 1000 repeated calls (CPU: 10) in each way, and prints the ten functions with
    most own time. Without a GPU the times are the interpreter's, and say nothing. Exit status: 0, or 1 if anything was
    wrong or failed or the ranks were lost, 2 if the command makes no sense, 130 if it was interrupted, by Ctrl-C or
    SIGTERM.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        plans = _plans(family, shapes or _SHAPES[device], variant, profile, rounds, seed, device, world_size)
        read = functools.partial(read_as, kind=HostRecord, speak=is_first)
        done = rows_to_go_on_from(out, None, read, resume=resume, overwrite=overwrite)
        plans = _left(plans, done, device, world_size)
        if profile:
            _make_folder(profile)
    except ValueError as error:
        refuse(error, speak=is_first)
    setting: dict[str, Any] = {"world_size": world_size, "device": device, "burst": _BURST[device], "seed": seed}
    output = Output[HostRecord](out if is_first else None, done, replace=overwrite)
    profiles, to_records = list[rank.Profile](), plain_records(HostRecord)

    def keep_profiles(plan: rank.Plan, measured: Any, columns: dict[str, Any]) -> list[HostRecord]:
        outcomes, of_plan = measured
        profiles.extend(of_plan)
        return to_records(plan, outcomes, columns)

    def show(records: Sequence[HostRecord]) -> None:
        print_host(report.make_console(), records)
        print_profiles(report.make_console(), profiles)

    measurement = Measurement(
        measure=rank.measure,
        to_records=keep_profiles,
        heap_bytes=_heap_bytes,
        title=lambda plan: f"{plan.family} {plan.shape}",
        name=lambda row: f"{row.family} {row.m}x{row.n}x{row.k}",
        summarise=lambda rows: "; ".join(
            f"{one.way} {one.kind} {report.time_or_status(one.median_us, one.status)}" for one in rows
        ),
    )
    ended_early = measurement.run(plans, output, setting, launcher=launcher, speak=is_first)
    conclude(output, ended_early, [*done, *output.records], show=show, launcher=launcher)


def _left(plans: list[rank.Plan], done: Sequence[HostRecord], device: str, world_size: int) -> list[rank.Plan]:
    """Return the problems of which a row is missing, or failed."""
    now = environment.versions()
    had = {
        (row.family, Shape(row.m, row.n, row.k), row.variant, row.way, row.kind)
        for row in done
        if (row.device, row.world_size) == (device, world_size) and is_finished(row, now, timed=False)
    }
    asked = {(way, kind) for way in WAYS for kind in kinds_of(way)}

    def is_left(plan: rank.Plan) -> bool:
        sizes = Shape(plan.shape.m, plan.shape.n, plan.shape.k)
        return not had >= {(plan.family, sizes, plan.variant, *row) for row in asked}

    return [plan for plan in plans if is_left(plan)]


def _heap_bytes(plan: rank.Plan, world_size: int) -> int:
    """Return how large a rank's heap must be for a problem's operators."""
    family, shape = FAMILIES[plan.family], plan.shape
    problem = family.problem(m=shape.m, n=shape.n, k=shape.k, world_size=world_size, dtype=torch.bfloat16)
    return _HEAP_BYTES + _OPERATORS * family.heap_bytes(problem)


def _plans(
    family: str,
    shapes: str,
    variant: str,
    profile: Path | None,
    rounds: int | None,
    seed: int,
    device: str,
    world_size: int,
) -> list[rank.Plan]:
    families = family.split(",")
    if unknown := set(families) - set(LAYERS):
        raise ValueError(f"--family {', '.join(sorted(unknown))}: there are {', '.join(LAYERS)}")
    rounds = _ROUNDS[device] if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"--rounds {rounds} makes no sense; it takes a positive number")
    plans = []
    for one in families:
        name = get_variant(one, variant).name
        for shape in parse_shapes(shapes, collective=FAMILIES[one].collective, world_size=world_size):
            for size in (shape.m, shape.n, shape.k):
                if size % world_size:
                    raise ValueError(f"--shapes {shape}: {size} must be a multiple of the {world_size} ranks")
            calls = (rounds, _BURST[device], rounds * _SINGLES_A_ROUND[device], _PROFILED[device])
            plans.append(rank.Plan(one, shape, name, *calls, str(profile or ""), seed))
    return plans


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write --profile {path}: {error.strerror or error}") from None


def print_host(console: Console, records: Sequence[HostRecord]) -> None:
    """Print a table per problem, of a row per way and kind of call, µs; and what was not right."""
    problems: dict[Any, dict[Any, HostRecord]] = {}
    for one in records:
        problem = (one.family, one.m, one.n, one.k, one.variant, one.world_size, one.device_name)
        problems.setdefault(problem, {})[one.way, one.kind] = one
    for (family, m, n, k, variant, world_size, device_name), rows in problems.items():
        title = f"{family} {m}x{n}x{k}, {variant}, {world_size} x {device_name}, us by rank 0's clock"
        console.print(Text(title, style="bold"))
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("call")
        for name in ("median", "lowest", "90 %", "highest", "calls"):
            table.add_column(name, justify="right")
        for (way, kind), one in rows.items():
            times = (one.median_us, one.lowest_us, one.p90_us, one.highest_us)
            cells = ["" if value is None else f"{value:,.1f}" for value in times]
            table.add_row(name_of(way, kind).replace("`", ""), *cells, "" if one.calls is None else str(one.calls))
        console.print(table)
        said = dict.fromkeys(f"{one.way}: {one.status}, {one.reason}" for one in rows.values() if one.reason)
        for line in said:
            console.print(line, markup=False)


def print_profiles(console: Console, profiles: Sequence[rank.Profile]) -> None:
    """Print of each profile where it is, and the functions with most own time, µs per call."""
    for one in profiles:
        console.print(Text(one.path, style="bold"))
        for function, us in one.functions:
            console.print(f"{us:10.2f} us  {function}", markup=False)
