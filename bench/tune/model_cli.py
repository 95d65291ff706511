"""The command ``iris-bench model``: predicted times, against measured ones or for machines that are not here."""

from __future__ import annotations

import statistics
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from iris_kernels.common.calibration.kept import machine_in
from iris_kernels.common.choice.measured import all_shipped_tables
from overlap_taxonomy import MACHINES, Machine, Work, list_variants, predict_ideal_us, predict_us
from overlap_taxonomy.fit import Measurement, error_of, fit, median_errors

from ..command.exits import refuse
from ..measure.families import FAMILIES
from ..measure.shapes import parse_shapes, parse_sizes
from ..measure.sweep import select_families
from ..records import report
from ..records.record import LIBRARY, Record, read_records
from .evaluate import HIDDEN, MEASURED, Judged, judge, judge_measured, verdict
from .measured import measurements, tables

_SHAPES = "8192x8192x8192"
_MACHINE = "h200x4"


def model(
    files: Annotated[list[Path] | None, typer.Argument(help="CSVs that run wrote, to compare with.")] = None,
    refit: Annotated[bool, typer.Option("--fit", help="Fit the constants to the CSVs first, and print them.")] = False,
    keep: Annotated[str, typer.Option(help="Constants that --fit leaves as they are, by commas.")] = "",
    machine: Annotated[str, typer.Option(help=f"Of {', '.join(MACHINES)}; several by commas.")] = _MACHINE,
    family: Annotated[str, typer.Option(help="'all', or names separated by commas; without CSVs.")] = "all",
    shapes: Annotated[str, typer.Option(help="As of run: sets, MxNxK, MODEL:LAYER:M; without CSVs.")] = _SHAPES,
    each: Annotated[bool, typer.Option("--each", help="Show every row of the CSVs, not the medians alone.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="A file that iris-bench calibrate wrote, here or elsewhere, for --machine.")
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Show how good `auto` is at problems that are hidden from it.")
    ] = False,
) -> None:
    """Print the cost model's median error against measured times, by variant; without CSVs, what it predicts.

    With --evaluate: how much slower what `auto` takes is than the fastest variant and than the library, for the
    problems of the CSVs, or else of the measured times that come with the library, each hidden from what it knows.

    Exit status: 0, or 2 if the command makes no sense.
    """
    console = report.make_console()
    try:
        chosen = [_machine(name.strip()) for name in machine.split(",")]
        calibrated = _calibrated(calibration) if calibration else None
        if calibrated:
            if machine != _MACHINE:
                raise ValueError(f"--calibration {calibration} is of {calibrated.name}; leave --machine out")
            chosen = [calibrated]
        for file in files or []:
            if parse_sizes(str(file)):
                raise ValueError(f"{file} is no CSV: sizes go to --shapes {file}, or to iris-bench explain")
        if refit and not files:
            raise ValueError("--fit needs CSVs to fit to, e.g. --fit sweep.csv")
        if keep and not refit:
            raise ValueError(f"--keep {keep} says what --fit leaves as it is; there is no --fit")
        if files and (family, shapes) != ("all", _SHAPES):
            raise ValueError("--family and --shapes say what to predict; with CSVs, their rows are what is compared")
        if evaluate:
            if refit or machine != _MACHINE or (family, shapes) != ("all", _SHAPES):
                raise ValueError("--evaluate takes CSVs, --calibration and --each alone")
            _evaluate(console, files or [], calibrated, each=each)
            return
        if each and not files:
            raise ValueError("--each shows the rows of CSVs; there are none, e.g. --each sweep.csv")
        if not files:
            families = select_families(family)
            for one in chosen:
                for name in families:
                    _predict(console, one, name, shapes)
            return
        records = [record for file in files for record in read_records(file)]
        for one in chosen:
            measured = measurements(records, one)
            if not measured:
                raise ValueError(
                    f"no row of the CSVs was measured on {one.world_size} x {one.gpu}{_measured_on(records)}"
                )
            _check_modelled(one, measured)
            if refit:
                one = fit(one, measured, keep=[name.strip() for name in keep.split(",") if name.strip()])
                _print_constants(console, one)
            _compare(console, one, measured, each=each)
    except ValueError as error:
        refuse(error)


def _machine(name: str) -> Machine:
    if name not in MACHINES:
        raise ValueError(f"unknown machine {name!r}; known machines: {', '.join(MACHINES)}")
    return MACHINES[name]


def _calibrated(path: Path) -> Machine:
    try:
        return machine_in(path.read_text(encoding="utf-8"), is_of_here=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot use --calibration {path}: {error}") from None


def _measured_on(records: list[Record]) -> str:
    """Say what rows were measured on, and which machines of the model that is."""
    found = dict.fromkeys((one.world_size, one.device_name) for one in records if one.device == "cuda")
    names = [name for name, one in MACHINES.items() if any(one.has(gpu) and one.world_size == n for n, gpu in found)]
    said = ", ".join(f"{size} x {gpu}" for size, gpu in found) or "no GPU"
    return f"; they are of {said}" + (f": --machine {','.join(names)}" if names else "")


def _check_modelled(machine: Machine, measured: list[Measurement]) -> None:
    """Raise ValueError if there is nothing to compare: no row is of a variant that the model knows."""
    if all(error_of(machine, one) is None for one in measured):
        names = ", ".join(sorted({f"{one.work.family}/{one.variant}" for one in measured}))
        raise ValueError(
            f"the model knows none of the variants measured on {machine.world_size} x {machine.gpu}: {names}; "
            "iris-bench model without CSVs lists those that it knows"
        )


def _evaluate(console: Console, files: list[Path], calibrated: Machine | None, *, each: bool) -> None:
    shipped = all_shipped_tables()
    records = [record for file in files for record in read_records(file)]
    asked = tables(records) if files else shipped
    summary = report.make_table(
        "GPUs", "hidden", "problems", "over fastest", "within 3 %", "library", "slower", "error"
    )
    by_hidden = {hidden: list(judge(asked, shipped, hidden, calibrated)) for hidden in HIDDEN}
    if not all(by_hidden.values()):
        raise ValueError("no problem of the CSVs has times of library and of one of ours on a GPU of the model")
    if files:
        by_hidden[MEASURED] = list(judge_measured(tables(records, with_auto=True)))
    for hidden, found in by_hidden.items():
        if each and found and hidden in (next(iter(HIDDEN)), MEASURED):
            _print_judged(console, found)
        for gpu, world_size in sorted({(one.gpu, one.key.world_size) for one in found}):
            here = [one for one in found if (one.gpu, one.key.world_size) == (gpu, world_size)]
            out = verdict(here)
            over_best = ", ".join(f"{ratio:.3f}" for ratio in out.over_best)
            over_library = ", ".join(f"{ratio:.3f}" for ratio in out.over_library)
            error = ", ".join(f"{error:.0%}" for error in out.error or ())
            shares = (f"{out.good:.0%}", over_library, str(out.slower), error)
            summary.add_row(_gpus(gpu, world_size), hidden, str(out.problems), over_best, *shares)
    console.print(summary)
    console.print(
        "What auto takes, over the fastest: geometric mean, 90th percentile, most; over the library: mean, most; "
        "slower than the library by over 2 %. Error of predicted times: median, 90th percentile. Where nothing is "
        "hidden, auto is judged by its own times in the CSVs."
    )


def _gpus(gpu: str, world_size: int) -> str:
    return f"{world_size} x {gpu.removeprefix('NVIDIA ').removesuffix(' 80GB HBM3')}"


def _print_judged(console: Console, judged: list[Judged]) -> None:
    table = report.make_table("problem", "auto", "over fastest", "library")
    for one in sorted(judged, key=lambda one: -one.over_best):
        key = one.key
        problem = f"{_gpus(one.gpu, key.world_size)} {key.family} {key.m}x{key.n}x{key.k}"
        ratios = f"{one.over_best:.3f}", f"{one.over_library:.3f}"
        table.add_row(problem, one.chosen, *ratios)
    console.print(table)


def _compare(console: Console, machine: Machine, measured: list[Measurement], *, each: bool) -> None:
    if each:
        table = report.make_table("family", "variant", "M x N x K", "measured us", "model us", "error")
        for one in measured:
            if (error := error_of(machine, one)) is not None:
                work = one.work
                sizes = f"{work.m}x{work.n}x{work.k}"
                table.add_row(
                    work.family, one.variant, sizes, f"{one.us:,.1f}", f"{one.us * (1 + error):,.1f}", f"{error:+.1%}"
                )
        console.print(table)
    errors = median_errors(machine, measured)
    table = report.make_table("family", "variant", "rows", "median error")
    for (family, variant), error in errors.items():
        rows = sum((one.work.family, one.variant) == (family, variant) for one in measured)
        table.add_row(family, variant, str(rows), f"{error:.1%}")
    console.print(table)
    sizes_of_errors = [abs(error) for one in measured if (error := error_of(machine, one)) is not None]
    console.print(f"{machine.name}: median error of all {statistics.median(sizes_of_errors):.1%}")
    unknown = sorted({one.variant for one in measured if error_of(machine, one) is None})
    if unknown:
        console.print(f"not modelled: {', '.join(unknown)}")


def _predict(console: Console, machine: Machine, family: str, shapes: str) -> None:
    label = (
        "model; its constants were measured" if machine.is_measured else "PREDICTION: not measured on such a machine"
    )
    collective = FAMILIES[family].collective
    for shape in parse_shapes(shapes, collective=collective, world_size=machine.world_size):
        work = Work(family, shape.m, shape.n, shape.k, machine.world_size)
        library = predict_us(machine, LIBRARY, work)
        sizes: dict[str, Any] = {"m": shape.m, "n": shape.n, "k": shape.k, "world_size": machine.world_size}
        ideal = predict_ideal_us(machine, work, FAMILIES[family].problem(**sizes, dtype=torch.bfloat16).wire_bytes)
        console.print(Text(f"{family}  {shape}  2-byte dtypes, {machine.name} ({label})", style="bold"))
        table = report.make_table("variant", "predicted us", "speedup", "efficiency")
        for variant in list_variants(family):
            us = predict_us(machine, variant.name, work)
            if us is not None and library is not None:
                table.add_row(variant.name, f"{us:,.1f}", f"{library / us:.2f}", f"{ideal / us:.2f}")
        table.add_row("ideal", f"{ideal:,.1f}", f"{library / ideal:.2f}" if library else "", "1.00")
        console.print(table)


def _print_constants(console: Console, machine: Machine) -> None:
    console.print("constants, for overlap_taxonomy/machines.py:")
    for column in fields(machine):
        if isinstance(getattr(machine, column.name), float):
            console.print(f"    {column.name}={getattr(machine, column.name)},", soft_wrap=True)
