"""What ``iris-bench explain`` prints of one problem, by the times and the model that come with the library."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from ..measure.shapes import Shape
from ..records.report import WIDTH
from ..tune.explain import explain, gpu_name, shipped
from ..tune.explain_cli import print_explanation

_FAMILY, _SHAPE, _GPU, _WORLD_SIZE = "gemm_reduce_scatter", Shape(300, 8192, 28672), "H200", 2
COMMAND = f"iris-bench explain {_SHAPE} --family {_FAMILY} --gpu {_GPU} --world-size {_WORLD_SIZE}"


def explain_output() -> str:
    """Return the command and its output, as a block of text."""
    gpu, text = gpu_name(_GPU), io.StringIO()
    one = explain(gpu, _WORLD_SIZE, _FAMILY, _SHAPE, torch.bfloat16, shipped(gpu))
    print_explanation(Console(file=text, width=WIDTH, highlight=False), one)
    lines = [f"$ {COMMAND}", *(line.rstrip() for line in text.getvalue().splitlines())]
    return "\n".join(["```", *lines, "```"])
