"""From rows of sweeps to what the model is compared with, and to tables of measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from iris_kernels.common.measured import Key, Measured, Table
from overlap_taxonomy import Arrangement, Machine, Work, copies_operands, list_variants, machine_for
from overlap_taxonomy.fit import Measurement

from ..record import DTYPES, LIBRARY, YARDSTICKS, Record, latest, thing_of

# What follows from clocks between two runs, at most: a tenth was seen (docs/performance.md). A host that held up the
# vendor's calls made it four times as much: 31 us in one run and 117 in another.
CLOCKS_DIFFER = 1.25
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def measurements(records: Iterable[Record], machine: Machine) -> list[Measurement]:
    """Return the times that were measured on a machine; ValueError for times of several bursts."""
    return [
        Measurement(record.variant, _work_of(record), record.time_us)
        for record in latest(_timed(records))
        if record.time_us and machine.has(record.device_name) and record.world_size == machine.world_size
    ]


def tables(records: Iterable[Record]) -> dict[str, Table]:
    """Return a table of times for each kind of GPU; of what was measured twice, the later time.

    Where a problem's times are of several runs, they are as if the vendor's had taken in each what it took in the last:
    a GPU that is cool, or another one, is faster by several percent. A run in which the vendor's took more than a
    quarter longer than in another is none to compare with: no GPU is so much slower than another of its kind, the host
    was late. Other times of that run are taken as they are. Problems are left out for which the vendor's, or any of
    ours, is not among them: there is nothing to choose by.

    Raises:
        ValueError: times of several bursts, which are not to be compared with each other.
    """
    left_out = {
        (variant.family, variant.name)
        for variant in list_variants()
        if variant.delegates or variant.arrangement is Arrangement.OTHERS
    }
    found: dict[str, dict[Key, dict[str, Record]]] = {}
    timed = _timed(records)
    least: dict[Any, float] = {}
    for record in timed:
        if record.library_us:
            least[record.problem_key] = min(record.library_us, least.get(record.problem_key, math.inf))

    def is_the_gpus(record: Record) -> bool:
        vendors = record.library_us
        return vendors is not None and vendors <= CLOCKS_DIFFER * least[record.problem_key]

    for record in latest(one for one in timed if one.variant != LIBRARY or is_the_gpus(one)):
        if (record.family, record.variant) in left_out:
            continue
        dtype = DTYPES[record.dtype]
        key = Key(record.family, record.m, record.n, record.k, record.world_size, dtype)
        found.setdefault(record.device_name, {}).setdefault(key, {})[record.variant] = record
    made = {
        gpu: {key: _in_one_measure(rows, is_the_gpus) for key, rows in table.items() if LIBRARY in rows}
        for gpu, table in found.items()
    }
    return {
        gpu: {key: Measured(times) for key, times in table.items() if _has_ours(key.family, times)}
        for gpu, table in made.items()
    }


def _in_one_measure(rows: dict[str, Record], is_the_gpus: Callable[[Record], bool]) -> dict[str, float]:
    """Return a problem's times by variant, those of other runs than the vendor's in its measure."""
    vendors, times = rows[LIBRARY].time_us, {}
    assert vendors
    for name, row in rows.items():
        assert row.time_us
        ratio = vendors / row.library_us if row.library_us and is_the_gpus(row) else 1.0
        times[name] = row.time_us * ratio
    return times


def _has_ours(family: str, names: Iterable[str]) -> bool:
    return any(variant.name in names for variant in list_variants() if variant.family == family and variant.has_kernels)


def _timed(records: Iterable[Record]) -> list[Record]:
    """Return the rows with a time of a GPU's that stands for what the variant is today; none of what failed since."""
    rows = list(records)
    failed = {thing_of(record) for record in latest(rows) if record.status != "ok"}
    timed = [
        record
        for record in rows
        if record.device == "cuda" and record.status == "ok" and record.time_us and record.variant not in YARDSTICKS
        if thing_of(record) not in failed and not _is_outdated(record)
    ]
    if len(bursts := sorted({record.burst for record in timed})) > 1:
        found = ", ".join(map(str, bursts))
        raise ValueError(f"the CSVs have times of bursts of {found}, which are not to be compared with each other")
    return timed


def _is_outdated(record: Record) -> bool:
    """Whether a row is of a kernel that read operands through pointers which are copied first today.

    Its configuration is rank 0's: today it speaks of pointers for a rank without operands alone.
    """
    machine = machine_for(record.device_name, record.world_size)
    copies = machine and copies_operands(machine, record.variant, _work_of(record))
    return bool(copies) and " pointers" in record.config


def _work_of(record: Record) -> Work:
    return Work(record.family, record.m, record.n, record.k, record.world_size, _ELEMENT_BYTES[record.dtype])
