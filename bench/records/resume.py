"""Going on with a file of rows: what of it need not be measured again, and whether new rows go with it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from iris_kernels.common.problem import Problem
from overlap_taxonomy import get_variant

from ..benchmarks.ccl.record import CclRecord
from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.host.record import HostRecord
from ..benchmarks.layers.record import LayersRecord
from ..benchmarks.links.record import LinkRecord
from ..benchmarks.norm.record import NormRecord
from ..measure import environment
from .frames import latest_records
from .record import YARDSTICKS, Record

AnyRows = (
    Sequence[Record]
    | Sequence[LayersRecord]
    | Sequence[DecoderRecord]
    | Sequence[LinkRecord]
    | Sequence[CclRecord]
    | Sequence[NormRecord]
)


class Done:
    """The rows that are there, the last of each thing.

    Args:
        records: all rows, in their order.
        timed: whether what goes on takes times.
    """

    def __init__(self, records: Sequence[Record], *, timed: bool) -> None:
        self._last = {record.key: record for record in latest_records(records)}
        self._timed = timed

    def is_finished(self, key: tuple[Any, ...]) -> bool:
        """Whether a thing need not be measured again: it is right, and has, if this takes times, one to compare."""
        record = self._last.get(key)
        if record is None or record.status != "ok":
            return False
        is_compared = record.library_us or record.variant in YARDSTICKS
        return not self._timed or bool(record.time_us and is_compared)

    def stays_unsupported(self, key: tuple[Any, ...], problem: Problem) -> bool:
        """Whether a thing was unsupported, and would be again.

        Either this process can say so without a rank, or only ranks could: one that makes the operator, or one whose
        kernels are interpreted beside GPUs. Those say the same again with the same versions of everything.
        """
        record = self._last.get(key)
        if record is None or record.status != "unsupported":
            return False
        if get_variant(record.family, record.variant).unsupported_reason(problem, None):
            return True
        of_ranks = record.reason.startswith("ValueError") or record.device == "cpu"
        return of_ranks and self._is_of_these_versions(record)

    def repeats(self, record: Record) -> bool:
        """Whether a row says of a thing that it is unsupported, for the reason that the last row gives."""
        last = self._last.get(record.key)
        return last is not None and {last.status, record.status} == {"unsupported"} and last.reason == record.reason

    def _is_of_these_versions(self, record: Record) -> bool:
        now = self._versions
        same = all(getattr(record, name) == now[name] for name in ("commit", "torch", "triton"))
        return same and not record.commit.endswith("-dirty")

    @functools.cached_property
    def _versions(self) -> dict[str, str]:
        return environment.versions()


def is_finished(record: Any, now: dict[str, str], *, timed: bool = True) -> bool:
    """Whether a row need not be measured again: it is right, and timed; or unsupported with the versions of now.

    Args:
        record: of a kind that has a status and versions and, where `timed`, a `time_us`.
        now: the versions.
        timed: whether what goes on takes times.
    """
    if record.status == "unsupported":
        return all(getattr(record, name) == now[name] for name in ("torch", "triton"))
    return record.status == "ok" and (not timed or bool(record.time_us))


def check_burst(done: AnyRows, *, device: str, burst: int) -> None:
    """Raise ValueError if rows of this kind of device were timed in other bursts: such times are another quantity."""
    others = sorted({record.burst for record in done if record.device == device and record.time_us} - {burst})
    if others:
        found = ", ".join(map(str, others))
        raise ValueError(
            f"--burst {burst}, but the file to go on with has times of bursts of {found}, which are not to be compared "
            f"with these; give --burst {others[0]} or another --out"
        )


def check_device(others: Iterable[str], name: str) -> None:
    """Raise ValueError if there are rows of this kind of device, GPUs or processors, of another name."""
    if found := sorted(set(others) - {name}):
        raise ValueError(
            f"this is {name}, and the file to go on with has rows of {', '.join(found)}, whose times these would be "
            "compared with; give another --out"
        )


def check_same_device(done: AnyRows | Sequence[HostRecord], device: str, name: str) -> None:
    """Raise ValueError if rows to go on from are of this kind of device, and of another name."""
    check_device([row.device_name for row in done if row.device == device], name)


def differences(done: AnyRows, *, device: str, timed: bool, **settings: Any) -> str:
    """Return how rows of this kind of device were made otherwise than those to come, in words; nothing if alike.

    Args:
        done: the rows.
        device, timed: of those to come.
        settings: by the names of their columns, beside the versions.
    """
    versions = environment.versions()
    now = settings | {name: versions[name] for name in ("commit", "torch", "triton")}
    rows = [record for record in done if record.device == device and (record.time_us or not timed)]
    said = []
    for name, value in now.items():
        others = dict.fromkeys(getattr(row, name) for row in rows if getattr(row, name) not in (None, value))
        if others:
            said.append(f"{name} {', '.join(map(str, others))} (now {value})")
    return "; ".join(said)
