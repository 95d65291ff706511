"""From rows of sweeps to what the model is compared with, and to tables of measured times."""

from __future__ import annotations

from collections.abc import Iterable

from iris_kernels.common.measured import Key, Measured, Table
from overlap_taxonomy import Machine, Work, copies_operands, list_variants, machine_for
from overlap_taxonomy.fit import Measurement

from ..record import DTYPES, LIBRARY, YARDSTICKS, Record, latest

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

    Problems for which the vendor's, or any of ours, is not among them are left out: there is nothing to choose by.

    Raises:
        ValueError: times of several bursts, which are not to be compared with each other.
    """
    delegating = {(variant.family, variant.name) for variant in list_variants() if variant.delegates}
    found: dict[str, dict[Key, dict[str, float]]] = {}
    for record in _timed(records):
        if (record.family, record.variant) in delegating or record.time_us is None:
            continue
        dtype = DTYPES[record.dtype]
        key = Key(record.family, record.m, record.n, record.k, record.world_size, dtype)
        found.setdefault(record.device_name, {}).setdefault(key, {})[record.variant] = record.time_us
    return {
        gpu: {key: Measured(times) for key, times in table.items() if LIBRARY in times and _has_ours(key.family, times)}
        for gpu, table in found.items()
    }


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
