"""The command ``iris-bench calibrate``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from iris_kernels.common.calibration.calibrate import LIMIT_S, Calibration, calibrate, facts_of
from iris_kernels.common.calibration.first_use import busy_reason
from iris_kernels.common.calibration.kept import is_shipped, machine_in, to_text, write_calibration
from iris_kernels.common.choice.tuning_cache import check_folder
from overlap_taxonomy import Machine

from ..command.exits import complain, leave, refuse
from ..command.options import Device, WorldSize
from ..command.progress import CommandProgress
from ..command.ranks import choose_setting, ending, find_launcher, start_ranks
from ..measure import job as measure
from ..records import report

_HEAP_BYTES = 1 << 20  # of a context that measures in one of its own


def calibrate_machine(
    world_size: WorldSize = None,
    device: Device = "auto",
    limit: Annotated[float, typer.Option(help="Seconds after which no further step begins.", min=0.0)] = LIMIT_S,
) -> None:
    """Measure this machine's constants, by which the cost model predicts, and `auto` chooses.

    About 15 s, or 60 where kernels must be compiled. The constants are kept in $IRIS_CACHE_DIR, or
    ~/.cache/iris-overlap, for this kind of GPU, number of ranks, and versions; `auto` goes by them where none that were
    measured on such a machine come with the library. What could not be measured stays as it was, and a line says why;
    another says if others used a GPU. Without a GPU nothing is kept. Exit status: 0, or 1 if nothing could be measured
    or the ranks were lost, or 2 if the command makes no sense.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        if is_first and device != "cpu":
            check_folder()
    except ValueError as error:
        refuse(error, speak=is_first)
    ranks = start_ranks(launcher, world_size, device)
    found: tuple[Calibration, dict[str, Any], str] | None = None
    console = report.make_console(stderr=True)
    console.quiet = not is_first
    with CommandProgress(console) as progress, ending(ranks) as ended:
        progress.add_task("measuring the machine", total=None)
        ranks.call(measure.open_rank, _HEAP_BYTES, device)
        found = ranks.call(_measure, limit)
        ranks.call(measure.close_rank)
    if is_first and ended.error:
        complain("the calibration", ended.error)
    if is_first and found:
        calibration, facts, busy = found
        text = to_text(facts, calibration.constants)
        if device == "cpu":
            print("interpreted kernels: their times say nothing of a machine, and nothing is kept")
        else:
            print_calibration(report.make_console(), calibration, machine_in(text))
        if busy:
            print(f"iris-bench: {busy}; the constants may be too slow: measure again when it rests", file=sys.stderr)
        if device != "cpu" and calibration.constants:
            path = write_calibration(facts["gpu"], world_size, text)
            print(f"iris-bench: kept in {path}", file=sys.stderr)
            if is_shipped(facts["gpu"], world_size):
                print(f"auto goes by what comes with the library for {facts['gpu']}; to compare: model --calibration")
    has_none = found is None or not found[0].constants
    leave(failed=has_none and device != "cpu", lost=ended.error is not None, launcher=launcher)


def print_calibration(console: Console, calibration: Calibration, taken: Machine) -> None:
    """Print each constant before, as measured, and as the model has `taken` it; and what was not measured."""
    table = report.make_table("constant", "before", "measured", "taken", left=1)
    for name, value in calibration.constants.items():
        values = calibration.assumed.constant(name), value, taken.constant(name)
        table.add_row(name, *(f"{one:.4g}" for one in values))
    machine = calibration.assumed
    console.print(f"{machine.world_size} x {machine.gpu}, {calibration.seconds:.0f} s")
    console.print(table)
    for line in calibration.left:
        console.print(f"as before: {line}", markup=False, soft_wrap=True)


def _measure(rank: int, world_size: int, limit_s: float) -> tuple[Calibration, dict[str, Any], str]:
    """Return what was measured, of which machine, and what says that others used a GPU ahead of it, or ""."""
    ctx = measure.context()
    busy = "" if ctx.is_interpreted() else busy_reason(ctx)
    busy = next((one for one in ctx.control_plane.all_gather(busy, "measure the machine") if one), "")
    return calibrate(ctx, limit_s=limit_s), facts_of(ctx), busy
