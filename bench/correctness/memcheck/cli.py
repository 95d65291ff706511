"""The command ``iris-bench memcheck``: every variant, two calls, under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ...command.exits import interrupted, refuse
from ...command.jobs import conclude
from ...command.options import Device, Names, OurNames, Overwrite, Resume
from ...command.outputs import rows_to_go_on_from
from ...measure import environment
from ...records import report
from ...records.csv_rows import Output, read_rows
from ...records.record import read_as
from ...records.resume import is_finished
from ..stress.plan import make_plan
from .record import MemcheckRecord

# Kernels run many times slower, and each rank's at its own pace.
_TIMEOUT_S = "300"
_DTYPES = "bf16,fp16,fp8"
_END_S = 10.0  # for the sanitizer to end its processes, where the command is interrupted
_REPORT = re.compile(r"=+ (Invalid|Misaligned|Out-of-range|Program hit)")
_SUMMARY = re.compile(r"=+ ERROR SUMMARY: (\d+) error")
# Not API errors: torch makes calls that may fail. --error-exitcode speaks for one process, the log for all.
_OPTIONS = ("--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no", "--error-exitcode", "1")


def memcheck(
    world_size: Annotated[int, typer.Option(help="Ranks, each on a GPU.")] = 2,
    device: Device = "auto",
    family: Names = "all",
    variant: OurNames = "all",
    out: Annotated[Path | None, typer.Option(help="CSV to write, a row per variant.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Call every variant twice on small shapes under compute-sanitizer, which looks for accesses out of bounds.

    Each variant has processes of its own, so that what is found is its. Exit status: 0, or 1 if anything is found or
    an output is wrong, or 2 if the command makes no sense or compute-sanitizer is not installed, or 130 if it was
    interrupted.
    """
    try:
        if device not in ("auto", "cuda"):
            raise ValueError(f"--device {device}: compute-sanitizer looks at NVIDIA GPUs alone; it takes auto or cuda")
        read = functools.partial(read_as, kind=MemcheckRecord)
        done = rows_to_go_on_from(out, None, read, resume=resume, overwrite=overwrite)
        plan = make_plan(
            families=family,
            variants=variant,
            dtypes=_DTYPES,
            device="cuda",
            world_size=world_size,
            seed=0,
            once=True,
        )
        sanitizer = _sanitizer()
    except ValueError as error:
        refuse(error)
    now = environment.versions()
    finished = {
        (row.family, row.variant) for row in done if row.world_size == world_size and is_finished(row, now, timed=False)
    }
    left = [key for key in dict.fromkeys(subject.variant_key for subject in plan.subjects) if key not in finished]
    output = Output[MemcheckRecord](out, done, replace=overwrite)
    try:
        for key in left:
            output.add([_checked(sanitizer, *key, world_size)])
    except KeyboardInterrupt:
        interrupted(output.left(), launcher=None, speak=True)
    conclude(output, None, [*done, *output.records], show=print_memcheck, launcher=None)


def print_memcheck(records: Sequence[MemcheckRecord]) -> None:
    """Print a row per variant, and of what is not right why."""
    table = report.make_table("family", "variant", "status", "errors", "seconds")
    for one in records:
        seconds = "" if one.seconds is None else f"{one.seconds:.0f}"
        table.add_row(one.family, one.variant, one.status, "" if one.errors is None else str(one.errors), seconds)
    console = report.make_console()
    console.print(table)
    for one in records:
        if one.reason:
            console.print(f"{one.family}/{one.variant}: {one.reason}", markup=False, soft_wrap=True)


def find_sanitizer() -> str | None:
    """Return where compute-sanitizer is; None where it is not installed."""
    return shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")


def _sanitizer() -> str:
    found = find_sanitizer()
    if found is None:
        raise ValueError(
            "no compute-sanitizer in PATH or /usr/local/cuda/bin; it comes with the CUDA toolkit (cuda-sanitizer)"
        )
    return found


@dataclass
class _Found:
    """What compute-sanitizer has printed: reports of one error each, and a summary per process with their number."""

    reports: int = 0
    summaries: int = 0
    summed: int = 0

    def read(self, line: str) -> None:
        self.reports += bool(_REPORT.match(line))
        if summary := _SUMMARY.match(line):
            self.summaries += 1
            self.summed += int(summary[1])

    @property
    def errors(self) -> int | None:
        """Of a process that was killed there are reports and no summary."""
        return max(self.reports, self.summed) if self.summaries or self.reports else None


def _checked(sanitizer: str, family: str, variant: str, world_size: int) -> MemcheckRecord:
    """Stress one variant under the sanitizer, print what both say, and return its row."""
    found, start = _Found(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "stress.csv")
        stress = ["-m", "iris_bench", "stress", "--once", "--device", "cuda", "--world-size", str(world_size)]
        stress += ["--dtype", _DTYPES, "--family", family, "--variant", variant, "--out", str(out)]
        process = subprocess.Popen(
            [sanitizer, *_OPTIONS, sys.executable, *stress],
            env=os.environ | {"IRIS_TIMEOUT_S": os.environ.get("IRIS_TIMEOUT_S", _TIMEOUT_S)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                found.read(line)
            exit_status = process.wait()
        except BaseException:
            _end(process)
            raise
        row = _stress_row(out)
    status, reason = _verdict(found, row, exit_status)
    return MemcheckRecord(
        family=family,
        variant=variant,
        errors=found.errors,
        seconds=time.monotonic() - start,
        status=status,
        reason=reason,
        world_size=world_size,
        device="cuda",
        device_name=row.get("device_name", ""),
        seed=int(row["seed"]) if row else None,
        driver=row.get("driver", ""),
        timestamp=environment.timestamp(),
        **environment.versions(),
    )


def _stress_row(path: Path) -> dict[str, str]:
    """Return the row that ``iris-bench stress`` has left; empty if it left none."""
    found = read_rows(path) if path.exists() else None
    return dict(zip(found.header, found.rows[-1][1], strict=True)) if found and len(found.rows) > 1 else {}


def _verdict(found: _Found, row: dict[str, str], exit_status: int) -> tuple[str, str]:
    """Return a variant's status and reason."""
    if found.errors:
        return "wrong", f"compute-sanitizer reports {found.errors} errors"
    if row and row["status"] == "wrong":
        return "wrong", f"{row['mismatches']} elements of outputs are wrong; seed {row['seed']}"
    if row and row["status"] == "error":
        return "error", row["error"]
    if exit_status or not row:
        return "error", f"exit status {exit_status}"
    if not found.summaries:
        return "error", "compute-sanitizer looked at nothing: there is no summary of it"
    return "ok", ""


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
