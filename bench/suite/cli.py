"""The command ``iris-bench measure``."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..benchmarks.links.measured import keep, this_machines
from ..benchmarks.links.record import LinkRecord
from ..command.exits import INTERRUPTED, refuse, warn
from ..command.options import WorldSize
from ..command.progress import CommandProgress
from ..command.ranks import choose_setting, count_gpus, find_launcher
from ..correctness.memcheck.cli import find_sanitizer
from ..measure import environment
from ..records import report
from ..records.record import read_as
from ..report.evidence import RESULTS, Machine, links
from .ledger import Ledger, choose_folder
from .plan import CPU_PLAN, GPU_PLAN, MEMCHECK, Entry, select
from .run import END_S, LEAST_S, Run, Running, Setting, slots

_UNITS = {"s": 1, "m": 60, "h": 3600}
_RANKS_WITHOUT_GPUS = 2
_BEFORE_S = 30.0  # at most, from the start of this command to that of the first entry


def measure_everything(
    only: Annotated[str, typer.Option(help="'all', or names and words of names, by commas: llama,fp8.")] = "all",
    limit: Annotated[
        str, typer.Option("--for", help="End within this time, as 8m or 1h30m; the next call goes on [default: never].")
    ] = "",
    world_size: WorldSize = None,
    device: Annotated[
        str, typer.Option(help="auto and cuda: GPUs; cpu: a few tiny measurements, to try this.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the CSVs [default: results/DATE-MACHINE, or the one begun].")
    ] = None,
    side_by_side: Annotated[
        bool, typer.Option("--side-by-side", help="As many at once as there are GPUs for; rows say on which they were.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--list", help="Show what is done and what is left, and measure nothing.")
    ] = False,
) -> None:
    """Measure everything that the report shows, anew, on this machine; a call that was ended early goes on.

    Each entry of the plan is a CSV that another command of iris-bench makes, which prints into the folder `log` beside
    it. All rows are of one commit. One entry that fails does not end the others, and is tried again by the next call.
    Exit status: 0, or 1 if anything was wrong or failed, with a list, or 2 if the command makes no sense, or 130 if it
    was interrupted, by Ctrl-C or SIGTERM.
    """
    try:
        if launcher := find_launcher():
            raise ValueError(f"the commands of a plan start their ranks; start this without {launcher.name}")
        device, world_size = _setting(device, world_size, needs_gpus=not show)
        entries = select(CPU_PLAN if device == "cpu" else GPU_PLAN, only, world_size)
        if not show and any(one.name == MEMCHECK for one in entries) and find_sanitizer() is None:
            entries = [one for one in entries if one.name != MEMCHECK]
            warn(f"{MEMCHECK} is left out: no compute-sanitizer, which comes with NVIDIA's CUDA toolkit, was found")
        until = time.monotonic() + parse_time(limit) if limit else None
        in_one = [one for one in entries if not one.resumes and one.seconds(world_size) > _time_for_entries(limit)]
        ledger = _ledger(out, device, world_size)
        if show:
            print_plan(report.make_console(), entries, ledger, world_size)
            return
        ledger.check_commits(entries)
        if in_one:
            named = ", ".join(f"{one.name} ({one.seconds(world_size):.0f} s)" for one in in_one)
            warn(f"too long for --for {limit}, as they are measured in one go, and left out: {named}")
        groups = _groups(world_size, device) if side_by_side else ("",)
        _keep_links(ledger, world_size)
    except ValueError as error:
        refuse(error)
    ledger.folder.mkdir(parents=True, exist_ok=True)
    _measure(entries, ledger, Setting(world_size, device, groups), until)


def _measure(entries: Sequence[Entry], ledger: Ledger, setting: Setting, until: float | None) -> None:
    """Run a plan, show how far it is, and end the command."""
    console = report.make_console(stderr=True)
    number = {entry.name: index for index, entry in enumerate(entries, 1)}
    failed: list[str] = []

    def begun(entry: Entry) -> None:
        console.print(f"[{number[entry.name]}/{len(entries)}] {entry.name}: begun", markup=False)

    def ended(entry: Entry, state: str, reason: str) -> None:
        spent = f"{ledger.rows(entry)} rows, {ledger.entries[entry.name].seconds:.0f} s in all"
        more = f": {reason}; all of it in {ledger.log(entry)}" if reason else ""
        what = {"begun": "ended before it was done"}.get(state, state)
        console.print(f"[{number[entry.name]}/{len(entries)}] {entry.name}: {what}, {spent}{more}", markup=False)
        if state == "failed":
            failed.append(entry.name)

    run = Run(entries, ledger, setting, until=until, begun=begun, ended=ended)
    total = run.left_s()
    try:
        with CommandProgress(console) as progress, contextlib.closing(run.run()) as ticks:
            task = progress.add_task("starting", total=max(total, 1.0))
            for _ in ticks:
                left = run.left_s()
                said = f"{_names(run.running)}, about {left / 60:.0f} min left"
                progress.update(task, completed=max(0.0, total - left), description=said)
    except KeyboardInterrupt:
        print(f"iris-bench: interrupted: {_what_is_left(entries, ledger)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    print(f"iris-bench: {_what_is_left(entries, ledger)}", file=sys.stderr)
    if failed:
        print(f"iris-bench: failed, and tried again by the next call: {', '.join(failed)}", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


def _names(running: Sequence[Running]) -> str:
    return ", ".join(one.entry.name for one in running)


def _what_is_left(entries: Sequence[Entry], ledger: Ledger) -> str:
    done = sum(ledger.state(entry) == "done" for entry in entries)
    more = "" if done == len(entries) else "; the same command goes on"
    return f"{done} of {len(entries)} measurements are done in {ledger.folder}{more}"


def _setting(device: str, world_size: int | None, *, needs_gpus: bool) -> tuple[str, int]:
    """Return the device and the number of ranks; 2 ranks where there are no GPUs to count.

    Raises:
        ValueError: there are no GPUs, which are needed, and --device cpu was not given.
    """
    is_cpu = device == "cpu"
    if is_cpu:
        world_size = world_size or _RANKS_WITHOUT_GPUS
    elif not count_gpus() and not needs_gpus:
        return "cuda", world_size or _RANKS_WITHOUT_GPUS
    device, world_size = choose_setting(device, world_size, launcher=None)
    if device == "cpu" and not is_cpu:
        raise ValueError(
            "measuring needs GPUs, and torch sees none here; --device cpu makes a few tiny measurements, whose times "
            "are not performance"
        )
    return device, world_size


def _ledger(out: Path | None, device: str, world_size: int) -> Ledger:
    """Return the ledger of the folder to measure into; GPUs that are not here, of a list, have no name."""
    commit = environment.commit()
    is_here = device == "cuda" and count_gpus()
    gpu = torch.cuda.get_device_name(0) if is_here else "cpu" if device == "cpu" else "gpu"
    machine = Machine(gpu, world_size).name
    folder = out or choose_folder(RESULTS / "local" if device == "cpu" else RESULTS, machine, commit)
    return Ledger(folder, machine, commit)


def _groups(world_size: int, device: str) -> tuple[str, ...]:
    if device == "cpu":
        raise ValueError("--side-by-side is of GPUs, which ranks do not share; leave it out with --device cpu")
    if environment.VISIBLE in os.environ:
        raise ValueError(
            f"--side-by-side sets {environment.VISIBLE}, which is set here; unset it, or leave the option out"
        )
    groups = slots(count_gpus(), world_size)
    if len(groups) < 2:
        raise ValueError(f"--side-by-side needs {2 * world_size} GPUs for {world_size} ranks; there are {count_gpus()}")
    return groups


def _keep_links(ledger: Ledger, world_size: int) -> None:
    """Keep the links that were measured in the folder for `ideal_us`: another machine of this kind may go on.

    Where they are not, as with --only, those of the newest folder of such a machine, if none were measured here.
    """
    path = ledger.folder / "links.csv"
    if path.exists():
        keep(read_as(path, LinkRecord, speak=False))
    elif count_gpus():
        machine = Machine(torch.cuda.get_device_name(0), world_size)
        if this_machines(machine.device_name, world_size).gbps is None:
            keep(links().get(machine, []))


def parse_time(text: str) -> float:
    """Return the seconds of a time like "8m", "90s" or "1h30m".

    Raises:
        ValueError: it is no such time, or too short to measure anything in.
    """
    parts = re.findall(r"(\d+)([smh])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise ValueError(f"--for {text} makes no sense; it takes a time like 90s, 8m or 1h30m")
    seconds = float(sum(int(count) * _UNITS[unit] for count, unit in parts))
    least = END_S + LEAST_S + _BEFORE_S
    if seconds < least:
        raise ValueError(f"--for {text} is too short to start ranks in; it takes {least:.0f}s or more")
    return seconds


def _time_for_entries(limit: str) -> float:
    return parse_time(limit) - END_S - _BEFORE_S if limit else math.inf


def print_plan(console: Console, entries: Sequence[Entry], ledger: Ledger, world_size: int) -> None:
    """Print a row per entry: what it runs, how long that should take, and what of it is done."""
    table = report.make_table("measurement", "state", "rows", "took s", "predicted s", left=2)
    table.add_column("iris-bench", overflow="fold")
    for entry in entries:
        ended = ledger.entries.get(entry.name)
        took = f"{ended.seconds:.0f}" if ended else ""
        cells = (ledger.state(entry), str(ledger.rows(entry) or ""), took, f"{entry.seconds(world_size):.0f}")
        table.add_row(entry.name, *cells, "\n".join(entry.commands))
    console.print(table)
    left = sum(ledger.left_s(entry, world_size) for entry in entries)
    console.print(f"{_what_is_left(entries, ledger)}; about {left / 60:.0f} min left", soft_wrap=True, markup=False)
