"""From rows of sweeps to what the model is compared with, and to tables of measured times."""

from __future__ import annotations

from collections.abc import Iterable

from iris_kernels.common.measured import Key, Measured, Table
from overlap_taxonomy import Machine, Work, copies_operands, list_variants, machine_for
from overlap_taxonomy.fit import Measurement

from ..record import DTYPES, LIBRARY, YARDSTICKS, Record, latest

_ONE_OF_THEM_THE_HOSTS = 1.25  # times the vendor's in another run: no GPU is so much slower than another of its kind
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def measurements(records: Iterable[Record], machine: Machine) -> list[Measurement]:
    """Return the times that were measured on a machine; ValueError for times of several bursts."""
    return [
        Measurement(record.variant, _work_of(record), record.time_us)
        for record in _timed(records)
        if record.time_us and machine.has(record.device_name) and record.world_size == machine.world_size
    ]


def tables(records: Iterable[Record]) -> dict[str, Table]:
    """Return a table of times for each kind of GPU; of what was measured twice, the later time.

    Where a problem's times are of several runs, they are as if the vendor's had taken in each what it took in the last:
    a GPU that is cool, or another one, is faster by several percent. A run in which the vendor's took more than a
    quarter longer or shorter is left out, as one of the two is the host's. So are problems for which the vendor's, or
    any of ours, is not among them: there is nothing to choose by.

    Raises:
        ValueError: times of several bursts, which are not to be compared with each other.
    """
    delegating = {(variant.family, variant.name) for variant in list_variants() if variant.delegates}
    found: dict[str, dict[Key, dict[str, Record]]] = {}
    for record in _timed(records):
        if (record.family, record.variant) in delegating or record.time_us is None:
            continue
        dtype = DTYPES[record.dtype]
        key = Key(record.family, record.m, record.n, record.k, record.world_size, dtype)
        found.setdefault(record.device_name, {}).setdefault(key, {})[record.variant] = record
    made = {
        gpu: {key: _of_one_run(rows) for key, rows in table.items() if LIBRARY in rows} for gpu, table in found.items()
    }
    return {
        gpu: {key: Measured(times) for key, times in table.items() if _has_ours(key.family, times)}
        for gpu, table in made.items()
    }


def _of_one_run(rows: dict[str, Record]) -> dict[str, float]:
    """Return a problem's times by variant, those of other runs than the vendor's in its measure."""
    vendors, times = rows[LIBRARY].time_us, {}
    assert vendors is not None
    for name, row in rows.items():
        assert row.time_us is not None
        ratio = vendors / row.library_us if row.library_us else 1.0
        if 1 / _ONE_OF_THEM_THE_HOSTS < ratio < _ONE_OF_THEM_THE_HOSTS:
            times[name] = row.time_us * ratio
    return times


def _has_ours(family: str, names: Iterable[str]) -> bool:
    return any(variant.name in names for variant in list_variants() if variant.family == family and variant.has_kernels)


def _timed(records: Iterable[Record]) -> list[Record]:
    timed = [
        record
        for record in latest(records)
        if record.device == "cuda" and record.status == "ok" and record.time_us and record.variant not in YARDSTICKS
        if not _is_outdated(record)
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
