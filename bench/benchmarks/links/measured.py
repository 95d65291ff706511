"""What a rank of this machine can send, as ``iris-bench links`` measured it: for the ideal of other commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from iris_kernels.common.choice.tuning_cache import cache_folder

from ...records.csv_rows import append_records
from ...records.record import read_as
from .record import LinkRecord

_SENDS = ("store", "copy", "all_store", "all_copy")


class Link(NamedTuple):
    """What a rank can send, and where that is known from.

    Args:
        gbps: in 10⁹ bytes a second; None where it was not measured.
        source: for the column `link_source`.
    """

    gbps: float | None
    source: str


def rate(records: Sequence[LinkRecord]) -> float | None:
    """Return what a rank sends by the fastest way and in the best size, the median over pairs of ranks.

    None where nothing was right.
    """
    frame = pd.DataFrame(records)
    sent = frame[frame.kind.isin(_SENDS) & (frame.status == "ok")] if len(frame) else frame
    return float(sent.groupby(["kind", "bytes"]).gbps.median().max()) if len(sent) else None


def keep(records: Sequence[LinkRecord]) -> Path | None:
    """Keep the rows of GPUs for `this_machines`; return where, or None if there is no rate in them.

    Raises:
        UnwritableError: they cannot be written.
    """
    if not records or records[0].device == "cpu" or rate(records) is None:
        return None
    path = _path(records[0].device_name, records[0].world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    append_records(path, records, replace=True)
    return path


def this_machines(device_name: str, world_size: int) -> Link:
    """Return what a rank can send on this machine, which has so many GPUs of this name at work."""
    try:
        records = read_as(_path(device_name, world_size), LinkRecord, speak=False)
    except ValueError:
        return Link(None, f"not measured on {world_size} x {device_name}: iris-bench links --world-size {world_size}")
    return Link(rate(records), f"iris-bench links, {records[0].timestamp[:10]}, {records[0].commit}")


def _path(device_name: str, world_size: int) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return cache_folder() / f"links-{name}-x{world_size}.csv"
