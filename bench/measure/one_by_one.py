"""Problem by problem, on ranks that stay: rows are written as they come, with a bar or lines that say how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from ..command.progress import CommandProgress
from ..command.ranks import Ranks, ending
from ..records import report
from ..records.csv_rows import Output
from ..records.resume import check_same_device
from . import environment, job

Problem = TypeVar("Problem")


def measure_each(
    problems: Sequence[Problem],
    ranks: Ranks,
    output: Output[Any],
    columns: dict[str, Any],
    *,
    heap_bytes: int,
    measure: Callable[[Problem], Sequence[Any]],
    describe: Callable[[Problem], str],
    describe_outcome: Callable[[Any], str],
    record: Callable[..., Any],
) -> Exception | None:
    """Measure problem by problem; return what ended this early.

    Args:
        problems: what to measure.
        ranks: which measure.
        output: what rows are added to.
        columns: of all rows; those of the machine, and of when it was, are added.
        heap_bytes: of each rank's heap.
        measure: returns a problem's outcomes, dataclasses.
        describe, describe_outcome: say what a problem, and an outcome, are.
        record: makes a row of an outcome's fields and the columns.
    """
    console = report.make_console(stderr=True)
    console.quiet = not ranks.is_first
    with CommandProgress(console) as progress, ending(ranks) as ended:
        task = progress.add_task("starting", total=len(problems))
        columns |= ranks.call(job.open_rank, heap_bytes, columns["device"])
        check_same_device(output.done, columns["device"], columns["device_name"])
        for number, problem in enumerate(problems, 1):
            described = describe(problem)
            progress.update(task, description=described)
            outcomes = measure(problem)
            columns["timestamp"] = environment.timestamp()
            output.add([record(**asdict(outcome), **columns) for outcome in outcomes])
            if not console.is_terminal:
                took = "; ".join(map(describe_outcome, outcomes))
                console.print(f"[{number}/{len(problems)}] {described}: {took}", markup=False)
            progress.advance(task)
        ranks.call(job.close_rank)
    return ended.error
