"""The command ``iris-bench decoder``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from ...command.exits import refuse, warn
from ...command.jobs import Measurement, conclude
from ...command.options import Device, Overwrite, Resume, Seed, WorldSize, select
from ...command.outputs import rows_to_go_on_from
from ...command.ranks import choose_setting, find_launcher
from ...records import report
from ...records.csv_rows import Output
from ...records.frames import latest_records
from ...records.looks import check_path
from ...records.record import read_as
from ...records.resume import check_burst, differences
from . import rank
from .models import MODELS, check_transformers
from .plan import heap_bytes, plan, still_to_do, to_records
from .plot import plot_decoder
from .record import DecoderRecord
from .show import print_decoder, step_name
from .systems import MODES, SYSTEMS

_MODEL = {"cpu": "tiny", "cuda": "llama-3-8b"}
_STEPS = {
    "cpu": {"prefill": "2x8", "decode": "4x8", "train": "2x8"},
    "cuda": {"prefill": "1x8192,1x2048,4x512", "decode": "1x2048,8x2048,64x2048", "train": "1x4096"},
}
_LAYERS = {"cpu": 2, "cuda": 4}
_DTYPES = {"cpu": "fp32", "cuda": "bf16"}


def decoder(
    model: Annotated[
        str | None, typer.Option(help=f"Whose sizes: {', '.join(MODELS)} [default: llama-3-8b; CPU: tiny].")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="How many of its layers [default: 4; CPU: 2].")] = None,
    system: Annotated[str, typer.Option(help=f"'all', or some of {', '.join(SYSTEMS)}.")] = "all",
    mode: Annotated[str, typer.Option(help=f"'all', or some of {', '.join(MODES)}.")] = "all",
    phase: Annotated[str, typer.Option(help=f"'all', or some of {', '.join(rank.PHASES)}.")] = "all",
    prefill: Annotated[str | None, typer.Option(help="BATCHxTOKENS, by commas [default: 1x8192,1x2048,4x512].")] = None,
    decode: Annotated[str | None, typer.Option(help="BATCHxPAST, by commas [default: 1x2048,8x2048,64x2048].")] = None,
    train: Annotated[str | None, typer.Option(help="BATCHxTOKENS, by commas [default: 1x4096].")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, fp8 [default: bf16; CPU: fp32].")] = None,
    world_size: WorldSize = None,
    device: Device = "auto",
    rounds: Annotated[int, typer.Option(help="Samples of each.")] = 5,
    burst: Annotated[int, typer.Option(help="Steps back to back in a sample.")] = 3,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="CSV to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to make: .png, .svg or .pdf.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure a tensor-parallel decoder of transformers' Llama layers: torch's parallelism beside ours, end to end.

    Outputs and gradients are checked against the whole model first. Without a GPU they are only checked. Exit status:
    0, or 1 if anything was wrong or failed, or the ranks were lost, or 2 if the command makes no sense, or 130 if it
    was interrupted.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        check_transformers()
        device, world_size = choose_setting(device, world_size, launcher=launcher)
        dtype = dtype or _DTYPES[device]
        given = {"prefill": prefill, "decode": decode, "train": train}
        setting: dict[str, Any] = {"world_size": world_size, "device": device}
        jobs = plan(
            model=model or _MODEL[device],
            layers=_LAYERS[device] if layers is None else layers,
            steps={name: given[name] or _STEPS[device][name] for name in select(phase, "--phase", rank.PHASES)},
            systems=select(system, "--system", tuple(SYSTEMS)),
            modes=select(mode, "--mode", tuple(MODES)),
            dtype=dtype,
            rounds=rounds,
            burst=burst,
            seed=seed,
            **setting,
        )
        if plot:
            check_path(plot)
        read = functools.partial(read_as, kind=DecoderRecord, speak=is_first)
        done = rows_to_go_on_from(out, plot, read, resume=resume, overwrite=overwrite)
        to_do = still_to_do(jobs, done, setting)
        if to_do:
            check_burst(done, device=device, burst=burst)
    except ValueError as error:
        refuse(error, speak=is_first)
    others = differences(done, device=device, timed=device != "cpu", rounds=rounds, seed=seed) if to_do else ""
    if is_first and others:
        warn(f"{out} was not made as the rows to come are: it has {others}")
    output: Output[DecoderRecord] = Output(out if is_first else None, done, replace=overwrite)
    measurement = Measurement(
        measure=rank.measure,
        not_begun=rank.not_begun,
        to_records=to_records,
        heap_bytes=heap_bytes,
        title=lambda job: f"{job.model}, {job.phase} {job.batch}x{job.sequence}",
        name=step_name,
    )
    ended_early = measurement.run(to_do, output, setting, launcher=launcher, speak=is_first)
    alike = {"model": jobs[0].model, "layers": jobs[0].layers, "dtype": dtype, **setting}
    rows = latest_records([*done, *output.records])
    conclude(
        output,
        ended_early,
        [row for row in rows if all(getattr(row, name) == value for name, value in alike.items())],
        show=lambda shown: print_decoder(report.make_console(), shown),
        plot=plot,
        draw=plot_decoder,
        launcher=launcher,
    )
