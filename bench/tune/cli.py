"""The commands ``iris-bench tune`` and ``iris-bench defaults``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from iris_kernels.common import choice
from iris_kernels.common.choice.measured import FORMAT, Measured, Table, file_name, key_of, to_json
from iris_kernels.common.choice.tuning_cache import check_folder, write_cache
from iris_kernels.common.config import GemmConfig
from overlap_taxonomy import list_variants

from ..command.exits import complain, leave, refuse
from ..command.options import FastAccum, Names, OperandDtype, Scales, Seed, Shapes
from ..command.outputs import check_new, check_outputs, writing
from ..command.progress import CommandProgress
from ..command.ranks import Ranks, choose_setting, ending, find_launcher, start_ranks
from ..measure import job as measure
from ..measure import sweep
from ..records import report
from ..records.record import LIBRARY, read_records
from . import candidates
from .candidates import Tuned
from .measured import tables

_SHIPPED = Path(choice.__file__).resolve().parent / "measured_times"  # where the library looks, installed or not
_LIBRARIES = (LIBRARY, "library_layout")  # what auto compares variants with


def tune(
    family: Names = "all",
    shapes: Shapes = "square",
    world_size: Annotated[int | None, typer.Option(help="Ranks [default: all GPUs].")] = None,
    dtype: OperandDtype = "bf16",
    scales: Scales = "",
    fast_accum: FastAccum = False,
    rounds: Annotated[int | None, typer.Option(help="Samples a candidate [default: 20].")] = None,
    burst: Annotated[int | None, typer.Option(help="Calls back to back in a sample [default: 10].")] = None,
    seed: Seed = 0,
) -> None:
    """Measure every variant, and configurations of the fastest, on this machine; `auto` goes by the result.

    It is kept in $IRIS_CACHE_DIR, or ~/.cache/iris-overlap. Only what is right is timed, as in run. Exit status: 0, or
    1 if the ranks were lost, or 2 if the command makes no sense.
    """
    is_first = True
    try:
        launcher = find_launcher()
        is_first = launcher is None or launcher.rank == 0
        device, world_size = choose_setting("auto", world_size, launcher=launcher)
        if device == "cpu":
            raise ValueError("tuning needs GPUs: the times of interpreted kernels are not performance")
        plan = sweep.make_plan(
            families=family,
            variants=",".join(_to_measure(sweep.select_families(family))),
            shapes=shapes,
            dtype=dtype,
            scales=scales,
            use_fast_accum=fast_accum,
            device=device,
            world_size=world_size,
            seed=seed,
            rounds=rounds,
            burst=burst,
            timed=True,
        )
        if is_first:
            check_folder()
    except ValueError as error:
        refuse(error, speak=is_first)
    ranks = start_ranks(launcher, world_size, device)
    ended_early = _run(plan, ranks, is_first=is_first)
    if ended_early and is_first:
        complain("tuning", ended_early)
    leave(failed=False, lost=ended_early is not None, launcher=launcher)


def _to_measure(families: Sequence[str]) -> list[str]:
    """Return the names of what `auto` chooses from, in any of these families."""
    variants = [variant for family in families for variant in list_variants(family)]
    return list(dict.fromkeys(one.name for one in variants if one.has_kernels or one.name in _LIBRARIES))


def defaults(
    files: Annotated[list[Path], typer.Argument(help="CSVs that run wrote; of what is in several, the last counts.")],
    out: Annotated[Path, typer.Option(help="Folder to write to, a file a kind of GPU.")] = _SHIPPED,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace tables that are there.")] = False,
) -> None:
    """Make the tables of measured times that come with the library, from sweeps.

    A table is of these sweeps alone: nothing of one that it replaces is kept. Exit status: 0, or 2 if a file is not
    what run writes, or OUT cannot be written or has a table already.
    """
    try:
        found = tables(record for file in files for record in read_records(file))
        if not found:
            raise ValueError("no row of the CSVs was timed on a GPU")
        if bare := [gpu for gpu, table in found.items() if not table]:
            raise ValueError(f"no problem of the CSVs has times of library and of one of ours on {', '.join(bare)}")
        paths = {gpu: out / file_name(gpu) for gpu in found}
        outputs = [("--out", path) for path in paths.values()]
        check_outputs(*outputs)
        check_new(*outputs, overwrite=overwrite)
    except ValueError as error:
        refuse(error)
    for gpu, table in found.items():
        path = paths[gpu]
        with writing(path):
            path.write_text(to_json({"format": FORMAT, "gpu": gpu}, table), encoding="utf-8")
        print(f"{path}: {len(table)} problems")


def _run(plan: sweep.Plan, ranks: Ranks, *, is_first: bool) -> Exception | None:
    """Tune problem by problem, and keep each as it ends; return what ended this early."""
    console = report.make_console(stderr=True)
    console.quiet = not is_first
    with CommandProgress(console) as progress, ending(ranks) as ended:
        task = progress.add_task("starting", total=len(plan.jobs))
        gpu = ranks.call(measure.open_rank, plan.heap_bytes, plan.device)["device_name"]
        for job in plan.jobs:
            progress.update(task, description=f"{job.family} {job.shape}")
            tuned: Tuned = ranks.call(candidates.tune, job)
            if is_first:
                table: Table = {key_of(job.family, job.problem()): _measured(tuned)} if tuned.times_us else {}
                path = write_cache(gpu, table)
                console.print(f"{job.family} {job.shape}: {_summary(tuned)}; kept in {path}", soft_wrap=True)
            progress.advance(task)
        ranks.call(measure.close_rank)
    return ended.error


def _measured(tuned: Tuned) -> Measured:
    return Measured(tuned.times_us, {name: GemmConfig(**config) for name, config in tuned.configs.items()})


def _summary(tuned: Tuned) -> str:
    if not tuned.times_us:
        return f"none of {tuned.tried} candidates was right"
    best = min(tuned.times_us, key=tuned.times_us.__getitem__)
    said = f"{best} {tuned.times_us[best]:,.1f} us, {LIBRARY} {tuned.times_us.get(LIBRARY, float('nan')):,.1f} us"
    bad = [f"{name} {why}" for name, why in tuned.failed.items() if not why.startswith("unsupported")]
    return f"{said}, of {tuned.tried} candidates" + (f"; {'; '.join(bad)}" if bad else "")
