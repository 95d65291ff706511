"""For the terminal: tables of records, of families and of shape sets, readable at 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_taxonomy import list_variants

from .record import LIBRARY, YARDSTICKS, Record, latest
from .shapes import SHAPE_SETS

WIDTH = 100  # where the output is no terminal
INTERPRETED = "interpreted: times are not performance"
_STATUS_STYLES = {"ok": "green", "wrong": "bold red", "error": "red", "unsupported": "yellow"}


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or `WIDTH` without one."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH)


def print_records(console: Console, records: Sequence[Record], over: str = LIBRARY) -> None:
    """Print a table for each problem, and under it why a variant is not ok; `over` is what their speedups are over."""
    problems: dict[tuple[object, ...], list[Record]] = {}
    for record in latest(records):
        problems.setdefault(record.problem_key, []).append(record)
    for rows in problems.values():
        console.print(Text(_headline(rows, over), style="bold"))
        console.print(_problem_table(rows))
        for row in rows:
            if row.reason:
                console.print(Text(f"  {row.variant}: {row.reason}", style=_STATUS_STYLES.get(row.status, "")))
        for library_us, names in _in_other_runs(rows, over).items():
            there = f"against {over} there: {_number(library_us, 1)} us" if library_us else "where it has no time"
            console.print(f"  {', '.join(names)}: measured in another run than the row of {over}, {there}")
        console.print()


def describe_problem(record: Record) -> str:
    """Return a line that names a record's problem."""
    return (
        f"{record.family}  M {record.m}  N {record.n}  K {record.k}  {record.dtype}, "
        f"{record.world_size} x {record.device_name}"
    )


def summarise(records: Sequence[Any]) -> str:
    """Return a line that counts what came out of rows of any kind that have a status."""
    counts = {status: sum(record.status == status for record in records) for status in _STATUS_STYLES}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count or status == "ok")


def print_families(console: Console) -> None:
    """Print the families and their variants, and the shape sets."""
    for family in dict.fromkeys(variant.family for variant in list_variants()):
        console.print(Text(family, style="bold"))
        table = _table("variant", "arrangement", "who communicates", "waits for", "summary")
        for variant in list_variants(family):
            table.add_row(
                variant.name, variant.arrangement.value, variant.agent.value, variant.sync.value, variant.summary
            )
        console.print(table)
        console.print()
    console.print(Text("shape sets", style="bold"))
    table = _table("name", "M x N x K", "what")
    for shape_set in SHAPE_SETS.values():
        sizes = ["x".join(map(str, size)) for size in shape_set.sizes("all_gather", 4)]
        more = f" and {len(sizes) - 4} more" if len(sizes) > 5 else ""
        table.add_row(shape_set.name, ", ".join(sizes[:4] if more else sizes) + more, shape_set.summary)
    console.print(table)


def _headline(rows: Sequence[Record], over: str) -> str:
    first = rows[0]
    line = describe_problem(first)
    if first.device == "cpu":
        return f"{line}\n{INTERPRETED}"
    ideal_us = next((row.ideal_us for row in rows if row.ideal_us), None)
    if over != LIBRARY:
        line += f"\nspeedups are over {over}"
    if ideal_us is None:
        return line
    return f"{line}\nideal {_number(ideal_us, 1)} us (GEMM alone, or the bytes at {first.link_gbps:g} GB/s)"


def _in_other_runs(rows: Sequence[Record], over: str) -> dict[float | None, list[str]]:
    """Which rows go with another time of the baseline than the one that the table shows, by that time, or with none."""
    shown = next((row.time_us for row in rows if row.variant == over), None)
    found: dict[float | None, list[str]] = {}
    for row in rows:
        is_compared = row.time_us and row.variant not in YARDSTICKS and row.device != "cpu"
        if shown and is_compared and row.library_us != shown:
            found.setdefault(row.library_us, []).append(row.variant)
    return found


def _problem_table(rows: Sequence[Record]) -> Table:
    is_cpu = rows[0].device == "cpu"
    table = _table("variant")
    for heading in ("time us", "latency us", *(() if is_cpu else ("TFLOP/s", "speedup", "of ideal")), "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for row in rows:
        figures = [_number(row.time_us, 1), _number(row.latency_us, 1)]
        if not is_cpu:
            figures += [_number(row.tflops, 1), _number(row.speedup_vs_library, 2), _number(row.overlap_efficiency, 2)]
        error = "" if row.error is None else f"{row.error:.1e}"
        table.add_row(row.variant, *figures, error, Text(row.status, style=_STATUS_STYLES.get(row.status, "")))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
