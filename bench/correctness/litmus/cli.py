"""The command ``iris-bench litmus``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...command.exits import refuse
from ...command.jobs import Measurement, conclude
from ...command.options import Device, Names, Overwrite, Seed, WorldSize, select
from ...command.outputs import check_new, check_outputs
from ...command.ranks import choose_setting, find_launcher
from ...measure import environment
from ...records import report
from ...records.csv_rows import Output
from . import rank
from .record import LitmusRecord

_ROUNDS = {"cpu": 40, "cuda": 1_000_000}
_HEAP_BYTES = 32 << 20


def litmus(
    litmus: Names = "all",
    rounds: Annotated[int | None, typer.Option(help="Of each test, at least [default: 1000000; CPU: 40].")] = None,
    world_size: WorldSize = None,
    device: Device = "auto",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write, a row a test.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Try the orderings that the documentation promises, and the same with something left out.

    Neighbouring ranks are pairs, so their number is even. A promised ordering is wrong if what it forbids is seen once;
    what is left out may be seen or not, as the hardware has it. Without a GPU only the programs themselves are tried:
    interpreted, nothing is reordered. Exit status: 0, or 1 if a promise was broken or the ranks were lost, or 2 if the
    command makes no sense, or 130 if it was interrupted.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        if world_size % 2:
            raise ValueError(f"world size {world_size} is odd, and litmus tests are of pairs of ranks; --world-size 2")
        names = select(litmus, "--litmus", tuple(rank.LITMUS))
        rounds = _ROUNDS[device] if rounds is None else rounds
        if rounds < 1:
            raise ValueError(f"--rounds {rounds} makes no sense; it takes a positive number")
        check_outputs(("--out", out))
        check_new(("--out", out), overwrite=overwrite)
    except ValueError as error:
        refuse(error, speak=is_first)
    output: Output[LitmusRecord] = Output(out if is_first else None, [], replace=overwrite)
    measurement = Measurement(
        measure=rank.measure,
        not_begun=rank.not_begun,
        to_records=_to_records,
        heap_bytes=lambda *_: _HEAP_BYTES,
        title=lambda job: f"{job.case.litmus}, {job.case.scope}",
        name=_describe,
    )
    jobs = [rank.Job(case, rounds, seed) for case in rank.cases(names)]
    setting = {"world_size": world_size, "device": device}
    ended_early = measurement.run(jobs, output, setting, launcher=launcher, speak=is_first)
    conclude(
        output,
        ended_early,
        output.records,
        show=lambda shown: print_litmus(report.make_console(), shown),
        launcher=launcher,
    )


def _to_records(job: rank.Job, outcome: rank.Outcome, columns: dict[str, Any]) -> list[LitmusRecord]:
    values = {name: getattr(outcome, name) for name in ("rounds", "forbidden", "seconds", "status", "reason")}
    common = columns | {"seed": job.seed, "timestamp": environment.timestamp()}
    return [LitmusRecord(**asdict(outcome.case), **values, **common)]


def _describe(record: LitmusRecord) -> str:
    return f"{record.litmus}, {record.scope}" + (f", without {record.weakened}" if record.weakened else "")


def print_litmus(console: Console, records: Sequence[LitmusRecord]) -> None:
    """Print a row for each test and scope: forbidden outcomes of the promised ordering, and with what is left out."""
    table = report.make_table("litmus", "scope", "rounds", "promised", "weakened")
    for one in records:
        if not one.weakened:
            same = [other for other in records if (other.litmus, other.scope) == (one.litmus, one.scope)]
            weakened = ", ".join(f"{other.weakened} {_count(other)}" for other in same if other.weakened)
            table.add_row(one.litmus, one.scope, f"{one.rounds:,}", _count(one), weakened)
    console.print("forbidden outcomes", table)
    for one in records:
        if one.reason:
            console.print(f"{_describe(one)}: {one.reason}", markup=False)


def _count(record: LitmusRecord) -> str:
    return record.status if record.forbidden is None else f"{record.forbidden:,}"
