"""The command ``iris-bench explain``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from iris_kernels.common.calibration.kept import kept_machine
from iris_kernels.common.choice.measured import device_name

from ..command.exits import refuse
from ..command.options import FastAccum, OperandDtype, Overwrite, Scales
from ..command.outputs import check_new, check_outputs, writing
from ..measure.families import FAMILIES
from ..measure.shapes import parse_shapes
from ..measure.sweep import how_scaled, select_families
from ..records import report
from ..records.looks import check_path
from ..records.record import OPERAND_DTYPES
from .explain import Explanation, explain, gpu_name, is_measured
from .explain_plot import plot_explanation

_GPU, _WORLD_SIZE = "H200", 4  # without a GPU


def explain_choice(
    shape: Annotated[str, typer.Argument(help="MxNxK of the whole problem, or a layer: llama-3-70b:gate:8192.")],
    family: Annotated[str, typer.Option(help="One family.")],
    gpu: Annotated[str | None, typer.Option(help=f"Such as H100 [default: this machine's; {_GPU} without].")] = None,
    world_size: Annotated[int | None, typer.Option(help="Ranks [default: all GPUs; 4 without].", min=1)] = None,
    dtype: OperandDtype = "bf16",
    scales: Scales = "",
    fast_accum: FastAccum = False,
    out: Annotated[Path | None, typer.Option(help="CSV file to write, a row per variant.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to make: .png, .svg or .pdf.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Say what `auto` would take for a problem, and why; nothing is run, and no GPU is needed.

    The predicted time of each variant: the work of the SMs, what the bytes to peers would take by themselves, what of
    that nothing hides, and latency. Then the time as measured problems correct it, over the library's, with its doubt,
    and how low it must be for `auto` to take the variant. Where the problem itself was measured, these times decide,
    and that column is empty. Exit status: 0, or 2 if the command makes no sense.
    """
    try:
        name, size = _machine(gpu, world_size)
        if plot:
            check_path(plot)
        families = select_families(family)
        if family == "all" or len(families) != 1:
            raise ValueError(f"--family takes one family, not {family!r}; known families: {', '.join(FAMILIES)}")
        if dtype not in OPERAND_DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; known dtypes: {', '.join(OPERAND_DTYPES)}")
        scaled = how_scaled(dtype, scales, use_fast_accum=fast_accum)
        collective = FAMILIES[families[0]].collective
        shapes = parse_shapes(shape, collective=collective, world_size=size)
        if len(shapes) != 1:
            raise ValueError(f"explain takes one shape, e.g. 8192x4096x14336 or llama-3-70b:gate:8192, not {shape!r}")
        check_outputs(("--out", out), ("--plot", plot))
        check_new(("--out", out), overwrite=overwrite)
        operands = getattr(torch, OPERAND_DTYPES[dtype])
        explanation = explain(name, size, families[0], shapes[0], operands, scales=scaled)
    except ValueError as error:
        refuse(error)
    print_explanation(report.make_console(), explanation)
    if out:
        _write(explanation, out)
    if plot:
        plot_explanation(explanation, plot)


def _machine(gpu: str | None, world_size: int | None) -> tuple[str, int]:
    """Return the GPU's name and the number of ranks that are asked for, or that are here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu is None:
        gpu = device_name(torch.device("cuda", 0)) if count else _GPU
    world_size = world_size or count or _WORLD_SIZE
    return gpu if kept_machine(gpu, world_size) else gpu_name(gpu), world_size


def print_explanation(console: Console, one: Explanation) -> None:
    """Print what is taken, and the tables that say why."""
    console.print(Text(f"{title_of(one)}: auto takes {one.choice.variant} ({one.choice.why})", style="bold"))
    if one.row != one.shape.m:
        console.print(f"times are of {one.row} rows, which stand for {one.shape.m} in auto's table")
    over = f"over\n{one.candidates[0].variant}"
    parts = report.make_table("model, us", "GEMM", "link", "wait", "latency", "GEMM + wait\n+ latency", left=1)
    compared = report.make_table(
        "with measured problems", "us", over, "doubt", "must be\nbelow", "measured\nus", left=1
    )
    for index, it in enumerate(one.candidates):
        name = ("* " if it.variant == one.choice.variant else "  ") + it.variant
        times = (it.parts.work_us, it.parts.link_us, it.parts.wait_us, it.parts.latency_us, it.parts.us)
        parts.add_row(name, *(f"{us:,.1f}" for us in times))
        needed = f"{it.needed:.2f}" if it.needed else ""
        ratios = [f"{it.over_library:.2f}", f"{it.doubt:.2f}", needed] if index else ["1.00", "", ""]
        compared.add_row(name, f"{it.us:,.1f}", *ratios, f"{it.measured_us:,.1f}" if it.measured_us else "")
    console.print(parts)
    console.print(compared)
    console.print(f"ideal, predicted: {one.ideal_us:,.1f} us: the library's GEMM alone, or the bytes on the link")
    near = report.make_table("nearest measured", "M x N x K", "fastest", "distance", over, left=3)
    for found in one.nearest:
        key = found.evidence.key
        gpus = f"{key.world_size} x {found.evidence.gpu.removeprefix('NVIDIA ')}"
        near.add_row(
            gpus, f"{key.m}x{key.n}x{key.k}", found.fastest, f"{found.distance:.2f}", f"{found.over_library:.2f}"
        )
    console.print(near if one.nearest else "no problem like it was measured on such GPUs")


def title_of(one: Explanation) -> str:
    """Return what is explained, and whether it is a prediction."""
    gpus = f"{one.machine.world_size} x {one.gpu.removeprefix('NVIDIA ')}"
    constants = "" if one.machine.is_measured else ", constants of another machine"
    said = "MEASURED" if is_measured(one.choice) else f"PREDICTION{constants}"
    return f"{said}: {one.family} {one.shape}, {gpus}"


def _write(one: Explanation, path: Path) -> None:
    fields = ["family", "m", "n", "k", "world_size", "gpu", "variant", "is_chosen", "work_us", "link_us", "wait_us"]
    fields += ["latency_us", "model_us", "corrected_us", "over_library", "doubt", "must_be_below", "measured_us"]
    with writing(path), path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*fields, "ideal_us"])
        for it in one.candidates:
            parts, shape = it.parts, one.shape
            problem = (one.family, shape.m, shape.n, shape.k, one.machine.world_size, one.gpu)
            times = (parts.work_us, parts.link_us, parts.wait_us, parts.latency_us, parts.us, it.us)
            compared = (it.over_library, it.doubt, it.needed)
            numbers = ["" if number is None else f"{number:.4g}" for number in (*times, *compared)]
            chosen = it.variant == one.choice.variant
            measured = f"{it.measured_us:.4g}" if it.measured_us else ""
            rows.writerow([*problem, it.variant, chosen, *numbers, measured, f"{one.ideal_us:.4g}"])
