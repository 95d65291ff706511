"""The command ``iris-bench check``: kernels under the race checker, or bugs that it must find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ...command.exits import refuse
from ...command.options import Names, OperandDtype, Scales
from ...command.ranks import check_interpreter
from . import CALLS

if TYPE_CHECKING:
    from .cases import Case

SCHEDULES = 4

_OF_PLANTED = ("only_planted", "schedules", "seed")  # what --planted goes with; the bugs bring the rest


def check(
    context: typer.Context,
    family: Names = "all",
    variant: Names = "all",
    world_size: Annotated[int, typer.Option(help="Ranks, all in this process.")] = 2,
    shapes: Annotated[
        str, typer.Option(help="MxNxK and shape sets, by commas; interpreted, so small [default: ragged ones].")
    ] = "",
    dtype: OperandDtype = "bf16",
    scales: Scales = "",
    descriptors: Annotated[
        bool, typer.Option("--descriptors", help="Read operands by tensor descriptors, copied first where need be.")
    ] = False,
    calls: Annotated[int, typer.Option(help="Calls of each operator, one after the other.")] = CALLS,
    schedules: Annotated[int, typer.Option(help="Orders of turns: in order, reversed, then random.")] = SCHEDULES,
    seed: Annotated[int, typer.Option(help="Of the operands and of the random orders.")] = 0,
    only_planted: Annotated[
        bool, typer.Option("--planted", help="Check kernels with a bug each; all must be found.")
    ] = False,
    cost: Annotated[bool, typer.Option("--cost", help="Also run without the checker, and compare.")] = False,
) -> None:
    """Look for data races, deadlocks and wrong answers without a GPU, over all ranks and in varied orders.

    Exit status: 0 if there are none, 1 if there are, 2 if the command makes no sense or none of what it names can be
    checked. With --planted, 0 if each bug is found.
    """
    from . import show  # here, not above: other commands do without the checker

    try:
        check_interpreter()
        for name, value in (("--calls", calls), ("--schedules", schedules)):
            if value < 1:
                raise ValueError(f"{name} {value} makes no sense; it takes a positive number")
        if only_planted:
            _refuse_beside_planted(context)
            found = show.find_planted(schedules=schedules, seed=seed)
            raise typer.Exit(0 if found else 1)
        cases = show.make_cases(
            family,
            variant,
            world_size=world_size,
            dtype=dtype,
            shapes=shapes,
            descriptors=descriptors,
            scales=scales,
        )
        _refuse_nothing(cases, variant)
    except ValueError as error:
        refuse(error)
    clean = show.check_all(cases, schedules=schedules, seed=seed, calls=calls, cost=cost)
    raise typer.Exit(0 if clean else 1)


def _refuse_beside_planted(context: typer.Context) -> None:
    """Raise ValueError if the command line has options that --planted does not look at."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in _OF_PLANTED and source and source.name == "COMMANDLINE":
            raise ValueError(f"--planted brings problems and kernels of its own; leave {parameter.opts[0]} out")


def _refuse_nothing(cases: Sequence[Case], variant: str) -> None:
    """Raise ValueError if none of the cases can be checked; says why not."""
    reasons: dict[str, list[str]] = {}
    for case in cases:
        reason = case.unsupported_reason()
        if reason is None:
            return
        reasons.setdefault(reason, []).append(f"{case.variant.family}/{case.variant.name}")
    said = "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items())
    raise ValueError(f"--variant {variant}: nothing of it can be checked: {said}")
