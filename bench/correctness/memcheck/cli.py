"""The command ``iris-bench memcheck``: every variant, two calls, under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Annotated

import typer

from ...command.options import Names, OurNames

# Kernels run many times slower, and each rank's at its own pace.
_TIMEOUT_S = "300"
_FOUND = re.compile(r"=+ (Invalid|Misaligned|Out-of-range|Program hit|ERROR SUMMARY: [1-9])")


def memcheck(
    world_size: Annotated[int, typer.Option(help="Ranks, each on a GPU.")] = 2,
    family: Names = "all",
    variant: OurNames = "all",
) -> None:
    """Call every variant twice on small shapes under compute-sanitizer, which looks for accesses out of bounds.

    Exit status: 0, or 1 if it finds any or an output is wrong, or 2 if it is not installed.
    """
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if sanitizer is None:
        print(
            "iris-bench: no compute-sanitizer in PATH or /usr/local/cuda/bin; it comes with the CUDA toolkit "
            "(cuda-sanitizer)",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    # Not API errors: torch makes calls that may fail. --error-exitcode speaks for one process, the log for all.
    options = ["--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no", "--error-exitcode", "1"]
    stress = ["-m", "iris_bench", "stress", "--once", "--device", "cuda", "--world-size", str(world_size)]
    stress += ["--family", family, "--variant", variant]
    environment = os.environ | {"IRIS_TIMEOUT_S": os.environ.get("IRIS_TIMEOUT_S", _TIMEOUT_S)}
    process = subprocess.Popen(
        [sanitizer, *options, sys.executable, *stress],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    found = summaries = 0
    for line in process.stdout:
        print(line, end="", flush=True)
        found += bool(_FOUND.match(line))
        summaries += "ERROR SUMMARY" in line
    status = process.wait()
    failed = found or status or not summaries  # without any summary nothing was looked at
    print(f"memcheck: {'failed' if failed else 'ok'}; {found} reports, {summaries} summaries, exit status {status}")
    raise typer.Exit(1 if failed else 0)
