"""What ``iris-bench check`` does and prints."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import JustifyMethod
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from iris_core import RankPool
from iris_core.checker import Report

from ...command.progress import CommandProgress
from ...records import report
from . import planted
from .cases import Case, exercise, make_cases, run_case

__all__ = ["check_all", "find_planted", "make_cases"]


def check_all(cases: Sequence[Case], *, schedules: int, seed: int, calls: int, cost: bool) -> bool:
    """Check case by case; print what is found, and return whether nothing is."""
    table = Table(box=None, pad_edge=False)
    figures = ("ranks", "accesses", "seconds", *(["times slower"] if cost else []))
    for heading in ("family", "variant", "M x N x K", *figures, "found"):
        is_of_words = heading in ("family", "variant", "found")
        justify: JustifyMethod = "right" if heading in ("ranks", "accesses", "seconds") else "left"
        table.add_column(heading, justify=justify, no_wrap=not is_of_words, overflow="fold")
    reports: list[Report] = []
    skipped = 0
    with _progress(len(cases)) as progress:
        for case in cases:
            progress.update(progress.task_ids[0], description=f"{case.variant.family} {case.variant.name}")
            row = [case.variant.family, case.variant.name, str(case.shape), str(case.world_size)]
            reason = case.unsupported_reason()
            if reason:
                skipped += 1
                table.add_row(*row, "", "", *([""] if cost else []), Text(f"not checked: {reason}", style="yellow"))
            else:
                found = run_case(case, schedules=schedules, seed=seed, calls=calls)
                reports.append(found)
                ratio = [f"{_slowdown(case, calls=calls, seed=seed):.1f}"] if cost else []
                table.add_row(*row, f"{found.accesses:,}", f"{found.seconds:.1f}", *ratio, _verdict(found))
                if not found.ok:
                    progress.console.print(
                        Text(f"{case.variant.family}/{case.variant.name}\n{found}\n"), soft_wrap=True
                    )
            progress.advance(progress.task_ids[0])
    console = report.make_console()
    console.print(table)
    bad = sum(not found.ok for found in reports)
    left_out = f", {skipped} not checked" if skipped else ""
    console.print(f"{len(reports) - bad} of {len(reports)} without a fault{left_out}; seed {seed}", markup=False)
    return bad == 0


def find_planted(*, schedules: int, seed: int) -> bool:
    """Check each planted bug; print a line each, and how many were found."""
    table = Table(box=None, pad_edge=False)
    for heading in ("bug", "in", "found"):
        table.add_column(heading)
    count = 0
    with _progress(len(planted.PLANTED)) as progress:
        for bug in planted.PLANTED:
            progress.update(progress.task_ids[0], description=bug.name)
            found = bug.run(schedules=schedules, seed=seed)
            count += found.found_ordering_fault
            verdict = _verdict(found) if found.found_ordering_fault else Text("NOT FOUND", style="bold red")
            table.add_row(bug.name, f"{bug.family}/{bug.variant}", verdict)
            progress.advance(progress.task_ids[0])
    console = report.make_console()
    console.print(table)
    console.print(f"found {count} of {len(planted.PLANTED)}")
    return count == len(planted.PLANTED)


def _verdict(found: Report) -> Text:
    if found.ok:
        return Text("nothing", style="green")
    counts = {"races": len(found.races), "deadlocks": len(found.deadlocks), "errors": len(found.errors)}
    return Text(", ".join(f"{count} {name}" for name, count in counts.items() if count), style="bold red")


def _slowdown(case: Case, *, calls: int, seed: int) -> float:
    """Return how many times the processor time of interpreting the ranks a checked schedule takes."""
    with RankPool(case.world_size, "cpu") as pool:
        pool.call(exercise, case, 1, seed)  # imports, and kernels rewritten for the interpreter
        seconds = sum(pool.call(_timed_exercise, case, calls, seed))
    start = time.process_time()
    run_case(case, schedules=1, seed=seed, calls=calls)
    return (time.process_time() - start) / seconds


def _timed_exercise(rank: int, world_size: int, case: Case, calls: int, seed: int) -> float:
    start = time.process_time()
    exercise(rank, world_size, case, calls, seed)
    return time.process_time() - start


def _progress(total: int) -> Progress:
    progress = CommandProgress(report.make_console(stderr=True))
    progress.add_task("starting", total=total)
    return progress
