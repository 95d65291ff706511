"""Tables in Markdown, and how numbers stand in them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..records import frames

SHORT = {
    "gemm_all_scatter": "all-scatter",
    "all_gather_gemm": "all-gather",
    "gemm_reduce_scatter": "reduce-scatter",
    "gemm_all_reduce": "all-reduce",
}  # families, in a column of a table


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, without columns that no row has anything in."""
    shown = [index for index in range(len(header)) if not rows or any(row[index] for row in rows)]
    lines = [[line[index] for index in shown] for line in (header, ["---"] * len(header), *rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def us(value: float) -> str:
    """Return a time in µs; empty for NaN."""
    if pd.isna(value):
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def ms(time_us: float | None) -> str:
    """Return a time of so many µs in ms; empty for none."""
    return f"{time_us / 1e3:.2f}" if time_us else ""


def times(ratio: float) -> str:
    """Return a speedup; empty for NaN."""
    return "" if pd.isna(ratio) else f"{ratio:.2f}×"


def with_speedup(time_us: float, library_us: float) -> str:
    """Return a time in µs, and in brackets how many times as long the library takes; without what is NaN."""
    return us(time_us) if pd.isna(time_us) or pd.isna(library_us) else f"{us(time_us)} ({times(library_us / time_us)})"


def mean_and_lowest(values: pd.Series) -> str:
    """Return the geometric mean and the lowest of some speedups; empty where there is none."""
    values = values.dropna()
    return f"{times(frames.geomean(values))}, {times(values.min())}" if len(values) else ""


def sizes(*numbers: int) -> str:
    """Return M, N and K as prose has them."""
    return " × ".join(map(str, numbers))
