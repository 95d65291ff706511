"""Where and with what a measurement was made, for its row."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
import triton

from iris_core import Context
from iris_core.context.hierarchical import HierarchicalContext
from iris_kernels.common.calibration.kept import driver

_PROJECT = Path(__file__).resolve().parents[2]
VISIBLE = "CUDA_VISIBLE_DEVICES"
INTERPRETER_NAME = "CPU (Triton interpreter)"


def versions() -> dict[str, str]:
    """Return the columns that are the same for a whole sweep: versions, commit, command line.

    The command line begins with the GPUs that it was given, where it was: others may have been at work beside them.
    """
    visible = os.environ.get(VISIBLE)
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "command": (f"{VISIBLE}={visible} " if visible else "") + shlex.join(["iris-bench", *sys.argv[1:]]),
    }


def device_columns(ctx: Context) -> dict[str, str]:
    """Return the name of a rank's device, with its sharing, hosts and the heap's provider, and its driver."""
    beside = f", {ctx.topology.num_hosts} hosts" if isinstance(ctx, HierarchicalContext) else ""
    beside += f", heap of {ctx.provider}" if ctx.provider else ""
    if ctx.is_interpreted():
        return {"device_name": INTERPRETER_NAME + beside, "driver": ""}
    shared = f", up to {ctx.ranks_on_device} ranks each" if ctx.ranks_on_device > 1 else ""
    return {"device_name": torch.cuda.get_device_name(ctx.get_device()) + shared + beside, "driver": driver()}


def timestamp() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """Return the project's commit, ``-dirty`` if files differ from it; ``IRIS_COMMIT`` overrides; else "unknown"."""
    given = os.environ.get("IRIS_COMMIT")
    if given:
        return given
    top = _output("git", "-C", str(_PROJECT), "rev-parse", "--show-toplevel")
    name = _output("git", "-C", str(_PROJECT), "rev-parse", "--short", "HEAD")
    if not name or not top or Path(top).resolve() != _PROJECT:  # installed somewhere inside another repository
        return "unknown"
    changes = _output("git", "-C", str(_PROJECT), "status", "--porcelain", "--", ".", ":!results")
    return f"{name}-dirty" if changes else name


def _output(*command: str) -> str:
    """What a command prints; nothing if it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
