"""Options that several commands have: named, and explained, alike."""

from __future__ import annotations

import math
from typing import Annotated, TypeVar

import typer

Number = TypeVar("Number", int, float)
Names = Annotated[str, typer.Option(help="'all', or names separated by commas.")]
OurNames = Annotated[str, typer.Option(help="'all', or names or patterns, by commas; baselines are left out.")]
Shapes = Annotated[str, typer.Option(help="Shape sets, MxNxK and MODEL:LAYER:M, separated by commas.")]
OperandDtype = Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")]
Scales = Annotated[str, typer.Option(help="Of fp8 operands: tensor, row or block [default: row].")]
FastAccum = Annotated[
    bool, typer.Option("--fast-accum", help="Leave sums of fp8 in the tensor cores' accumulators, in all variants.")
]
WorldSize = Annotated[int | None, typer.Option(help="Ranks [default: all GPUs; 4 without].")]
Hosts = Annotated[int, typer.Option(help="As how many hosts the ranks act, which share no heap.")]
Device = Annotated[str, typer.Option(help="auto, cpu (interpreted) or cuda (NVIDIA or AMD GPUs).")]
Seed = Annotated[int, typer.Option(help="Of the random data.", min=0, max=2**63 - 1)]
Over = Annotated[str, typer.Option(help="What speedups are over: a variant, or a yardstick, of the same run.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep the rows of --out; measure what is not ok in it.")]


def select(text: str, option: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that an option gives, in the order of those that are known.

    Raises:
        ValueError: one is unknown; names the option, and what it takes.
    """
    names = known if text == "all" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {option} {name!r}; it takes 'all', or some of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def numbers(option: str, text: str, kind: type[Number], *, most: float = math.inf) -> tuple[Number, ...]:
    """Return the numbers that an option lists, by commas.

    Raises:
        ValueError: one is not positive, finite and at most `most`; names the option.
    """
    try:
        found = tuple(kind(one) for one in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < one < math.inf and one <= most for one in found):
        limit = f", each at most {most:g}" if most < math.inf else ""
        raise ValueError(f"{option} {text} makes no sense; it takes positive numbers by commas{limit}")
    return found
