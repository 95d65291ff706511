"""For the terminal: tables of records, of families and of shape sets, readable at 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_taxonomy import Variant, list_variants

from ..measure.families import FAMILIES
from ..measure.shapes import SHAPE_SETS, layer_name
from . import frames
from .record import LIBRARY, Record

WIDTH = 100  # where the output is no terminal
INTERPRETED = "interpreted: times are not performance"
_STATUS_STYLES = {"ok": "green", "wrong": "bold red", "error": "red", "unsupported": "yellow"}


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or `WIDTH` without one."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH)


def make_table(*columns: str, left: int = 2) -> Table:
    """Return a table of these columns, the first `left` of them of words and the others of numbers.

    Where a terminal is narrow, words go on in the next line, and numbers stay whole.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        is_of_words = index < left
        table.add_column(column, no_wrap=not is_of_words, overflow="fold", justify="left" if is_of_words else "right")
    return table


def print_records(console: Console, records: Sequence[Record]) -> None:
    """Print the latest rows of each thing measured; see `print_frame`."""
    print_frame(console, frames.latest(frames.to_frame(records)))


def print_frame(console: Console, frame: pd.DataFrame, over: str = LIBRARY) -> None:
    """Print a table for each problem, and under it why a variant is not ok; `over` is what their speedups are over.

    Of interpreted kernels, whose times are not performance: what was right and what was not, a line per variant.
    """
    if not (interpreted := frame[frame.device == "cpu"]).empty:
        _print_verdicts(console, interpreted)
    for _, rows in frame[frame.device != "cpu"].groupby(frames.PROBLEM, sort=False):
        console.print(Text(_headline(rows, over), style="bold"))
        console.print(_problem_table(rows))
        _print_reasons(console, rows)
        for library_us, names in _in_other_runs(rows, over).items():
            there = f"against {over} there: {_number(library_us, 1)} us" if library_us else "where it has no time"
            console.print(f"  {', '.join(names)}: measured in another run than the row of {over}, {there}")
        console.print()


def _print_verdicts(console: Console, frame: pd.DataFrame) -> None:
    """Print how many shapes of each variant were ok, wrong, unsupported and failed; then what was wrong or failed."""
    first, shapes = frames.rows_of(frame)[0], frame.groupby(["m", "n", "k"]).ngroups
    console.print(Text(f"{first.world_size} ranks, {INTERPRETED}; shapes checked: {shapes}", style="bold"))
    variants = frames.variants_only(frame)
    counts = variants.pivot_table(
        index=["family", "variant"], columns="status", values="m", aggfunc="count", fill_value=0, sort=False
    )
    counts = counts.reindex(columns=list(_STATUS_STYLES), fill_value=0)
    table = make_table("variant", *_STATUS_STYLES, "largest\nerror", left=1)
    errors = variants.groupby(["family", "variant"]).error.max().rename("largest")
    shown = ""
    for row in frames.rows_of(counts.join(errors).reset_index()):
        cells = [Text(str(getattr(row, name) or ""), style=style) for name, style in _STATUS_STYLES.items()]
        largest = "" if pd.isna(row.largest) else f"{row.largest:.1e}"
        if row.family != shown:
            table.add_row(Text(row.family, style="bold"))
            shown = row.family
        table.add_row(f"  {row.variant}", *cells, largest)
    console.print(table)
    for _, rows in frame[frame.status.isin(("wrong", "error"))].groupby(frames.PROBLEM, sort=False):
        console.print(Text(describe_problem(frames.rows_of(rows)[0])))
        _print_reasons(console, rows)


def _print_reasons(console: Console, rows: pd.DataFrame) -> None:
    for row in frames.rows_of(rows[rows.reason != ""]):
        console.print(Text(f"  {row.variant}: {row.reason}", style=_STATUS_STYLES.get(row.status, "")))


def describe_problem(record: Any) -> str:
    """Return a line that names the problem of a record, or of a row of a table of records."""
    return (
        f"{frames.name_of(record)}  {_named(record)}M {record.m}  N {record.n}  K {record.k}  {record.dtype}, "
        f"{record.world_size} x {record.device_name}"
    )


def _named(record: Any) -> str:
    name = layer_name(FAMILIES[record.family].collective, record.n, record.k) if record.family in FAMILIES else None
    return f"{name}  " if name else ""


def time_or_status(us: float | None, status: str) -> str:
    """Return a time in µs as lines of progress have it, or the status of what has none."""
    return status if us is None else f"{us:,.1f} us"


def summarise(records: Sequence[Any]) -> str:
    """Return a line that counts what came out of rows of any kind that have a status."""
    counts = {status: sum(record.status == status for record in records) for status in _STATUS_STYLES}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count or status == "ok")


def print_families(console: Console) -> None:
    """Print the families and their variants, and the shape sets."""
    for family in dict.fromkeys(variant.family for variant in list_variants()):
        console.print(Text(family, style="bold"))
        table = make_table("variant", "what it does, and its place in the taxonomy")
        for variant in list_variants(family):
            table.add_row(variant.name, f"{variant.summary}\n{_place(variant)}")
        console.print(table)
        console.print()
    console.print(Text("shape sets", style="bold"))
    table = make_table("name", "M x N x K", "what", left=3)
    for shape_set in SHAPE_SETS.values():
        sizes = ["x".join(map(str, size)) for size in shape_set.sizes("all_gather", 4)]
        more = f" and {len(sizes) - 4} more" if len(sizes) > 5 else ""
        table.add_row(shape_set.name, ", ".join(sizes[:4] if more else sizes) + more, shape_set.summary)
    console.print(table)


def _place(variant: Variant) -> str:
    axes = {
        "arrangement": variant.arrangement,
        "communicates": variant.agent,
        "waits for": variant.sync,
        "main loop": variant.mainloop,
        "schedule": variant.schedule,
    }
    return "; ".join(f"{name}: {axis.value}" for name, axis in axes.items())


def _headline(rows: pd.DataFrame, over: str) -> str:
    first = frames.rows_of(rows)[0]
    line = describe_problem(first)
    if over != LIBRARY:
        line += f"\nspeedups are over {over}"
    timed = rows[rows.ideal_us.notna()]
    if not timed.empty:
        ideal_us = _number(timed.iloc[0].ideal_us, 1)
        source = f", {first.link_source}" if first.link_source else ""
        link = "" if pd.isna(first.link_gbps) else f", or the bytes at {first.link_gbps:.3g} GB/s{source}"
        return f"{line}\nideal {ideal_us} us (GEMM alone{link})"
    return f"{line}\nno ideal: links {first.link_source}" if first.link_source else line


def _in_other_runs(rows: pd.DataFrame, over: str) -> dict[float | None, list[str]]:
    """Which rows go with another time of the baseline than the one that the table shows, by that time, or with none."""
    shown = rows[rows.variant == over].time_us
    if shown.empty or pd.isna(shown.iloc[0]):
        return {}
    compared = frames.variants_only(rows[rows.time_us.notna()])
    others = compared[compared.library_us != shown.iloc[0]]
    return {
        None if pd.isna(library_us) else library_us: list(group.variant)
        for library_us, group in others.groupby("library_us", sort=False, dropna=False)
    }


def _problem_table(rows: pd.DataFrame) -> Table:
    table = make_table("variant", "time us", "latency", "TFLOP/s", "speedup", "of ideal", "error", left=1)
    table.padding = (0, 0)
    table.add_column("status", no_wrap=True)
    for row in frames.rows_of(rows):
        figures = [_number(row.time_us, 1), _number(row.latency_us, 1), _number(row.tflops, 1)]
        figures += [_number(row.speedup_vs_library, 2), _number(row.overlap_efficiency, 2)]
        error = "" if pd.isna(row.error) else f"{row.error:.1e}"
        table.add_row(row.variant, *figures, error, Text(row.status, style=_STATUS_STYLES.get(row.status, "")))
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None or pd.isna(value) else f"{value:,.{digits}f}"
