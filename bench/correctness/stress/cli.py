"""The command ``iris-bench stress``."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from ...command.exits import interrupted, leave, refuse
from ...command.options import Device, Names, OurNames, WorldSize
from ...command.progress import CommandProgress
from ...command.ranks import Ranks, choose_setting, ending, find_launcher, start_ranks
from ...measure import environment
from ...records import report
from ...records.csv_rows import append_records, in_a_line
from . import rank
from .plan import Plan, make_plan
from .record import StressRecord, check_file

SECONDS = 60.0
_CHUNK = {"cpu": 20, "cuda": 1000}  # calls between two looks at what was found
_REPORTS = 10


def stress(
    family: Names = "all",
    variant: OurNames = "all",
    dtype: Annotated[
        str, typer.Option(help="bf16, fp16, fp32, fp8 of formats and scales at random; the first is called most.")
    ] = "bf16,fp16,fp8",
    world_size: WorldSize = None,
    device: Device = "auto",
    seconds: Annotated[
        float | None,
        typer.Option(help="Call for so long, once every operator was compiled and called [default: 60]."),
    ] = None,
    calls: Annotated[int | None, typer.Option(help="End after so many calls, those of the warm-up included.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Two calls per variant on small shapes, and no more.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of all that is drawn [default: a new one].")] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to add a row to.")] = None,
) -> None:
    """Call all operators in a random order, with ranks held up at random, and check every element of every output.

    Exit status: 0, or 1 if anything was wrong or the run ended early, or 2 if the command makes no sense, or 130 if it
    was interrupted, by Ctrl-C or SIGTERM; what was checked until then is reported, and in the row, all the same.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher, timed=False)
        limit = _Limit(seconds, calls, once)
        plan = make_plan(
            families=family,
            variants=variant,
            dtypes=dtype,
            device=device,
            world_size=world_size,
            seed=random.SystemRandom().randrange(1 << 31) if seed is None else seed,
            once=once,
        )
        if out and is_first:
            check_file(out)
    except ValueError as error:
        refuse(error, speak=is_first)
    ranks = start_ranks(launcher, world_size, device)
    shown = _Run(plan, limit, quiet=not is_first)
    shown.run(ranks)
    if is_first:
        shown.report()
        if out:
            append_records(out, [shown.record()])
    if shown.is_interrupted:
        left = f"its row was added to {out}" if out else "with --out a row of it would be kept"
        interrupted(left, launcher=launcher, speak=is_first)
    leave(failed=shown.status != "ok", lost=bool(shown.error), launcher=launcher)


class _Limit:
    """When a run has done enough.

    Raises:
        ValueError: limits that make no sense.
    """

    def __init__(self, seconds: float | None, calls: int | None, once: bool) -> None:
        for name, value in (("--seconds", seconds), ("--calls", calls)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} {value} makes no sense; it takes a positive number")
            if value is not None and once:
                raise ValueError(f"--once ends by itself; leave {name} out")
        self.seconds = SECONDS if seconds is None and calls is None else seconds
        self.calls = 0 if once else calls

    def calls_left(self, progress: rank.Progress, most: int) -> int:
        """Return how many calls to make next, `most` at most; 0 to end."""
        if self.seconds is not None and progress.elapsed_s >= self.seconds:
            return 0
        return most if self.calls is None else max(0, min(most, self.calls - sum(progress.calls)))

    def left(self, progress: rank.Progress) -> str:
        """Return, in words, the seconds that are left."""
        return f", {max(0.0, self.seconds - progress.elapsed_s):.0f} s left" if self.seconds else ""

    def done(self, progress: rank.Progress) -> float:
        """Return how much of the run is done, 0 to 1."""
        by_time = progress.elapsed_s / self.seconds if self.seconds else 0.0
        by_calls = sum(progress.calls) / self.calls if self.calls else 0.0
        return min(1.0, max(by_time, by_calls))


class _Run:
    """A run as its command sees it; decisions follow from what the ranks say, which is the same for all of them."""

    def __init__(self, plan: Plan, limit: _Limit, *, quiet: bool) -> None:
        self.plan, self.limit = plan, limit
        self.progress = rank.Progress((0,) * len(plan.subjects), 0, 0)
        self.reports: list[str] = []
        self.error = ""
        self.warm_up_s = 0.0
        self.is_interrupted = False
        self._is_warm = False
        self._columns: dict[str, Any] = {"device_name": "", "driver": "", "seed": plan.seed, **environment.versions()}
        self._console = report.make_console(stderr=True)
        self._console.quiet = quiet

    @property
    def status(self) -> str:
        return "error" if self.error else "wrong" if self.progress.mismatches else "ok"

    def run(self, ranks: Ranks) -> None:
        """Make the run; what ends it early is kept in `error`."""
        console = self._console
        start = time.monotonic()
        with CommandProgress(console) as bar:
            task = bar.add_task("starting", total=None)
            try:
                with ending(ranks) as ended:
                    self._columns |= ranks.call(rank.open_rank, self.plan)
                    console.print(f"seed {self._columns['seed']}: {len(self.plan.subjects)} operators", markup=False)
                    self._warm_up(ranks, bar, task)
                    self.warm_up_s, self._is_warm = time.monotonic() - start, True
                    while count := self.limit.calls_left(self.progress, _CHUNK[self.plan.device]):
                        said = f"{sum(self.progress.calls):,} calls, {self.progress.mismatches:,} mismatches"
                        said += self.limit.left(self.progress)
                        bar.update(task, total=1.0, completed=self.limit.done(self.progress), description=said)
                        self._keep(ranks.call(rank.call_often, count))
                    ranks.call(rank.close_rank)
                if ended.error:
                    self.error = in_a_line(ended.error)
            except KeyboardInterrupt:
                self.error, self.is_interrupted = "interrupted", True
            if not self._is_warm:
                self.warm_up_s = time.monotonic() - start

    def _warm_up(self, ranks: Ranks, bar: Progress, task: TaskID) -> None:
        """Make all operators, compile their kernels together, and call each once."""
        operators = range(len(self.plan.subjects))
        bar.update(task, description="operators made", total=len(operators))
        for index in operators:
            ranks.call(rank.make_operator, index)
            bar.advance(task)
        done, kernels = -1, 0
        while done < kernels:
            done, kernels = ranks.call(rank.compile_some)
            bar.update(task, description="kernels compiled", completed=done, total=kernels)
        bar.update(task, description="operators warmed up", completed=0, total=len(operators))
        for index in operators:
            self._keep(ranks.call(rank.warm_up, index))
            bar.advance(task)

    def report(self) -> None:
        """Print what was called and what was found."""
        _print_calls(report.make_console(), self.plan, self.progress)
        for line in self.reports[:_REPORTS]:
            print(f"iris-bench: wrong: {line}", file=sys.stderr)
        if len(self.reports) > _REPORTS:
            print(f"iris-bench: and {len(self.reports) - _REPORTS} more wrong calls", file=sys.stderr)
        if self.error:
            calls = sum(self.progress.calls)
            print(f"iris-bench: the run ended early, after {calls:,} checked calls: {self.error}", file=sys.stderr)
        record = self.record()
        print(
            f"{record.status}: {record.calls:,} calls, of each variant {self._fewest_calls():,} or more, "
            f"{record.elements:,} elements, {record.mismatches:,} mismatches "
            f"in {record.seconds:.1f} s after {record.warm_up_seconds:.1f} s of warm-up; seed {record.seed}"
        )

    def record(self) -> StressRecord:
        """Return the row of this run."""
        subjects = self.plan.subjects
        return StressRecord(
            device=self.plan.device,
            world_size=self.plan.world_size,
            families=len({subject.family for subject in subjects}),
            variants=len({subject.variant_key for subject in subjects}),
            dtypes=" ".join(dict.fromkeys(subject.dtype for subject in subjects)),
            operators=len(subjects),
            calls=sum(self.progress.calls),
            elements=self.progress.elements,
            mismatches=self.progress.mismatches,
            seconds=self.progress.elapsed_s if self._is_warm else 0.0,
            warm_up_seconds=self.warm_up_s,
            status=self.status,
            error=self.error,
            timestamp=environment.timestamp(),
            **self._columns,
        )

    def _fewest_calls(self) -> int:
        return min(map(sum, _by_variant(self.plan, self.progress).values()))

    def _keep(self, progress: rank.Progress) -> None:
        self.progress = progress
        self.reports += progress.reports


def _by_variant(plan: Plan, progress: rank.Progress) -> dict[tuple[str, str], list[int]]:
    """Return the calls of each variant's operators."""
    calls: dict[tuple[str, str], list[int]] = {}
    for subject, count in zip(plan.subjects, progress.calls, strict=True):
        calls.setdefault(subject.variant_key, []).append(count)
    return calls


def _print_calls(console: Console, plan: Plan, progress: rank.Progress) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("family", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    table.add_column("operators", justify="right")
    table.add_column("calls", justify="right")
    for (family, variant), counts in _by_variant(plan, progress).items():
        table.add_row(family, variant, f"{len(counts):,}", f"{sum(counts):,}")
    console.print(table)
