"""The command ``iris-bench layers``."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import environment, measure, report
from .. import plot as plots
from ..csv_rows import append_records
from ..exits import complain, interrupted, leave, refuse, warn
from ..families import FAMILIES
from ..options import Device, Overwrite, Seed, WorldSize
from ..outputs import check_new, check_outputs
from ..ranks import Ranks, choose_setting, ending, find_launcher, start_ranks
from ..record import DTYPES
from ..shapes import parse_sizes
from . import rank
from .plot import plot_layers
from .record import LayersRecord
from .subjects import LAYOUTS, SUBJECTS

_BLOCKS = {"cpu": "16x16x32", "cuda": "8192x4096x14336,8192x8192x28672,2048x8192x28672,64x8192x28672"}
_DTYPES = {"cpu": "fp32", "cuda": "bf16"}
_ROUNDS = {"cpu": 1, "cuda": 8}
_BURST = {"cpu": 1, "cuda": 10}
_SHOWN = 300  # characters of a reason; the file has all of them
_HEAP_BYTES = 64 << 20  # for the context, flags, and what is rounded


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
        jobs = plan(
            blocks=blocks or _BLOCKS[device],
            subjects=_select(subject, "--subject", tuple(SUBJECTS)),
            layouts=_select(layout, "--layout", LAYOUTS),
            phases=_select(phase, "--phase", rank.PHASES),
            dtype=dtype or _DTYPES[device],
            rounds=_ROUNDS[device] if rounds is None else rounds,
            burst=_BURST[device] if burst is None else burst,
            seed=seed,
            world_size=world_size,
        )
        if plot:
            plots.check_path(plot)
            if "torch" not in jobs[0].subjects:
                raise ValueError("--plot shows speedups over torch; --subject leaves it out")
        check_outputs(("--out", out), ("--plot", plot))
        check_new(("--out", out), overwrite=overwrite)
    except ValueError as error:
        refuse(error, speak=is_first)
    ranks = start_ranks(launcher, world_size, device)
    output = _Output(out if is_first else None)
    ended_early = None
    try:
        ended_early = _run(jobs, ranks, output, {"world_size": world_size, "device": device, **environment.versions()})
    except KeyboardInterrupt:
        interrupted(output.left(), launcher=launcher, speak=is_first)
    if is_first:
        print_layers(report.make_console(), output.records)
        if ended_early:
            complain("the measurement", ended_early)
        if plot:
            try:
                plot_layers(output.records, plot)
            except ValueError as error:
                warn(f"there is no {plot}: {error}")
    failed = any(record.status in ("wrong", "error") for record in output.records)
    leave(failed=failed, lost=ended_early is not None, launcher=launcher)


@dataclass
class _Output:
    """The rows so far, and the file that they are added to; it is replaced when there are some."""

    path: Path | None
    records: list[LayersRecord] = field(default_factory=list)

    def add(self, records: list[LayersRecord]) -> None:
        if self.path:
            append_records(self.path, records, replace=not self.records)
        self.records += records

    def left(self) -> str:
        """What an interrupted run leaves, in words."""
        count = len(self.records)
        if not self.path:
            return f"{count} rows are lost; with --out they would be kept"
        return f"{count} rows were written to {self.path}" if count else "nothing was written"


def _run(jobs: Sequence[rank.Job], ranks: Ranks, output: _Output, columns: dict[str, Any]) -> Exception | None:
    """Measure job by job; return what ended this early."""
    console = report.make_console(stderr=True)
    console.quiet = not ranks.is_first
    with ending(ranks) as ended:
        needed = max(heap_bytes(job, columns["world_size"]) for job in jobs)
        columns |= ranks.call(measure.open_rank, needed, columns["device"])
        with report.make_progress(console) as progress:
            for number, job in enumerate(progress.track(jobs, description="pairs"), 1):
                try:
                    outcomes = ranks.call(rank.measure, job)
                except Exception as error:
                    reason = f"the measurement ended here: {type(error).__name__}: {error}"
                    output.add(to_records(job, rank.not_begun(job, " ".join(reason.split())), columns))
                    raise
                records = to_records(job, outcomes, columns)
                output.add(records)
                if not console.is_terminal:
                    what = f"{_describe(records[0])}: {report.summarise(records)}"
                    console.print(f"[{number}/{len(jobs)}] {what}", markup=False)
        ranks.call(measure.close_rank)
    return ended.error


def _describe(record: LayersRecord) -> str:
    return f"{record.tokens} tokens, {record.width} to {record.features} and back, {record.layout}"


def plan(
    *,
    blocks: str,
    subjects: Sequence[str],
    layouts: Sequence[str],
    phases: Sequence[str],
    dtype: str,
    rounds: int,
    burst: int,
    seed: int,
    world_size: int,
) -> list[rank.Job]:
    """Return what is to be measured.

    Raises:
        ValueError: something given is unknown or makes no sense; names it, and what would work.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known dtypes: {', '.join(DTYPES)}")
    for name, value in (("--rounds", rounds), ("--burst", burst)):
        if value < 1:
            raise ValueError(f"{name} {value} makes no sense; it takes a positive number")
    jobs = []
    names = dict.fromkeys(block.strip() for block in blocks.split(","))
    for block, layout in itertools.product(names, layouts):
        sizes = parse_sizes(block)
        if sizes is None:
            raise ValueError(
                f"unknown block {block!r}; it takes TOKENSxWIDTHxFEATURES, three positive integers, "
                "e.g. 8192x8192x28672"
            )
        tokens, width, features = sizes
        cut = {"width": width, "features": features} | ({"tokens": tokens} if layout == "sequence" else {})
        for name, size in cut.items():
            if size % world_size:
                raise ValueError(f"block {block}: its {name}, {size}, must be a multiple of the {world_size} ranks")
        job = rank.Job(
            tokens=tokens,
            width=width,
            features=features,
            layout=layout,
            phases=tuple(phases),
            subjects=tuple(subjects),
            dtype=DTYPES[dtype],
            rounds=rounds,
            burst=burst,
            seed=seed,
        )
        jobs.append(job)
    return jobs


def _select(text: str, option: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = known if text == "all" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {option} {name!r}; it takes 'all', or some of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def heap_bytes(job: rank.Job, world_size: int) -> int:
    """Return what the operators of a job hold of a rank's heap, at most; all subjects share them."""
    sizes = {"m": job.tokens, "world_size": world_size, "dtype": getattr(torch, job.dtype)}
    out_of = {"n": job.width, "k": job.features} | sizes
    if job.layout == "replicated":
        needed = FAMILIES["gemm_all_reduce"].heap_bytes(FAMILIES["gemm_all_reduce"].problem(**out_of))
    else:
        into = FAMILIES["all_gather_gemm"].problem(n=job.features, k=job.width, **sizes)
        scattered = FAMILIES["gemm_reduce_scatter"].problem(**out_of)
        # Forwards without what was gathered, and with it; backwards the same.
        needed = 2 * FAMILIES["all_gather_gemm"].heap_bytes(into)
        needed += FAMILIES["gemm_reduce_scatter"].heap_bytes(scattered)
    return needed + _HEAP_BYTES


def to_records(job: rank.Job, outcomes: Sequence[rank.Outcome], columns: dict[str, Any]) -> list[LayersRecord]:
    """Return a job's rows. Interpreted times are compared with nothing."""
    is_cpu = columns["device"] == "cpu"
    by_torch = {one.phase: one.time_us for one in outcomes if one.subject == "torch" and not is_cpu}
    names = {long: short for short, long in DTYPES.items()}
    common = {key: getattr(job, key) for key in ("tokens", "width", "features", "layout", "rounds", "burst", "seed")}
    common |= columns | {"dtype": names[job.dtype], "timestamp": environment.timestamp()}
    records = []
    for one in outcomes:
        torch_us = by_torch.get(one.phase)
        speedup = torch_us / one.time_us if torch_us and one.time_us else None
        values = asdict(one) | ({"host_us": None} if is_cpu else {})
        records.append(LayersRecord(**values, **common, speedup_vs_torch=speedup))
    return records


def print_layers(console: Console, records: Sequence[LayersRecord]) -> None:
    """Print a table for each pair and phase."""
    for _, group in itertools.groupby(records, attrgetter("tokens", "width", "features", "layout", "phase")):
        rows = list(group)
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
