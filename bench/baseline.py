"""Speedups over another row than that of `library`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .record import LIBRARY, Record, latest


def over(records: Sequence[Record], baseline: str) -> list[Record]:
    """Return the latest records, their speedups over the row of another variant, or of a yardstick, of the same run.

    A run is known by its time of `library`. `library_us` is then the time of that row, and the speedup the ratio of the
    two; both are None where that row has no time in the run.

    Raises:
        ValueError: no row of that name has a time to compare with; says which have.
    """
    shown = latest(records)
    if baseline == LIBRARY:
        return shown
    timed = [record for record in shown if record.library_us and record.time_us and record.device != "cpu"]
    if baseline not in {record.variant for record in timed}:
        names = ", ".join(dict.fromkeys(record.variant for record in timed))
        raise ValueError(
            f"no row of {baseline!r} has a time to compare with; rows that have: {names or 'none'}"
            + ("" if names else " (interpreted times are not performance)")
        )
    times = {(*record.problem_key, record.library_us): record.time_us for record in timed if record.variant == baseline}
    return [_over(record, times.get((*record.problem_key, record.library_us))) for record in shown]


def _over(record: Record, baseline_us: float | None) -> Record:
    speedup = baseline_us / record.time_us if baseline_us and record.time_us else None
    return replace(record, library_us=baseline_us, speedup_vs_library=speedup)
