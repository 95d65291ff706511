"""The CSV: one row per family, variant, shape, dtype and world size. Tables and plots are made from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from overlap_taxonomy import GEMM_ALONE, current_name

from ..benchmarks.ccl.record import CclRecord
from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.host.record import HostRecord
from ..benchmarks.layers.record import LayersRecord
from ..benchmarks.links.record import LinkRecord
from ..benchmarks.norm.record import NormRecord
from ..correctness.litmus.record import LitmusRecord
from ..correctness.memcheck.record import MemcheckRecord
from ..correctness.stress.record import StressRecord
from ..measure.shapes import OLD_NAMES
from .csv_rows import as_text, read_rows

COMMUNICATION_ALONE = "communication_alone"
LIBRARY = "library"
YARDSTICKS = (GEMM_ALONE, COMMUNICATION_ALONE)  # rows that are no variant
STATUSES = ("ok", "wrong", "unsupported", "error")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as rows and options name them, and as torch does
OPERAND_DTYPES = DTYPES | {"fp8": "float8_e4m3fn"}  # those of operators' operands
SCALES = {"tensor": ("tensor", "tensor"), "row": ("row", "column"), "block": ("block", "block")}  # of fp8 operands


@dataclass(frozen=True)
class Record:
    """A row. Empty in the file is None here, or the empty string where a column holds text.

    Args:
        family: what is computed, such as all_gather_gemm.
        variant: its full name. Two rows are of no variant: gemm_alone, cuBLAS's GEMM, and communication_alone, the
            collective.
        shape_set: where the shape is from; "explicit" where its sizes were given.
        m, n, k: of the whole problem; m is the number of tokens of all ranks.
        epilogue: names of the ops that are applied to C, separated by commas.
        scales: of what fp8 operands have a scale each: tensor, row or block; "-fast" behind it where sums stay in the
            tensor cores' accumulators (`use_fast_accum`).
        world_size: ranks, a GPU each.
        dtype: of the operands.
        device: "cpu" (interpreted: its times are not performance) or "cuda" (any GPU).
        device_name: as the driver gives it; behind it how many hosts the ranks act as, where that is more than one.
        status: "ok", "wrong" (a check failed; not timed), "unsupported" or "error"; `reason` says more.
        correct: whether every check passed; empty where there was none.
        error: the largest ‖out − ref‖ / ‖ref‖ of all checks and ranks.
        time_us: of a call in a burst of calls back to back after a barrier, the slowest rank's median.
        latency_us: of one call alone after a barrier, the same; not to be compared with `time_us`.
        host_us: what it takes the host to queue a call; hidden from the two above on a GPU, as calls are queued ahead.
            Where it was not in most rounds, `reason` says so.
        library_us: `time_us` of the variant `library` in the same run: not that of the file's row of `library`, where
            `--resume` has added this one.
        ideal_us: the longer of gemm_alone and the bytes on the link at `link_gbps`.
        tflops: 10¹² floating-point operations a second of one rank, from `time_us`.
        speedup_vs_library: library_us / time_us.
        overlap_efficiency: ideal_us / time_us.
        reason: why a row is not ok, or what else is to be known of it.
        config: tiles, programs and stages of the kernels; of `auto`, the variant that it took comes first.
        rounds, burst: how many rounds were timed, and how many calls are in one.
        seed: of the random data.
        link_gbps: what a rank can send by its fastest way, as `iris-bench links` measured it, or `--link-gbps`.
        link_source: where `link_gbps` is from, or that it was not measured: then there is no ideal.
        torch, triton, driver, commit: versions.
        timestamp: when it was measured, UTC.
        command: the whole command that made the row.
    """

    family: str
    variant: str
    shape_set: str
    m: int
    n: int
    k: int
    epilogue: str
    scales: str
    world_size: int
    dtype: str
    device: str
    device_name: str
    status: str
    correct: bool | None
    error: float | None
    time_us: float | None
    latency_us: float | None
    host_us: float | None
    library_us: float | None
    ideal_us: float | None
    tflops: float | None
    speedup_vs_library: float | None
    overlap_efficiency: float | None
    reason: str
    config: str
    rounds: int
    burst: int
    seed: int
    link_gbps: float | None
    link_source: str
    torch: str
    triton: str
    driver: str
    commit: str
    timestamp: str
    command: str

    def __post_init__(self) -> None:
        """Keep what the file will keep: a table is the same from either."""
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, float):
                object.__setattr__(self, column.name, float(as_text(value)))

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells measurements of different things apart."""
        sizes = self.m, self.n, self.k, self.world_size
        return (self.family, self.variant, *sizes, self.dtype, self.device, self.epilogue, self.scales)

    @property
    def thing(self) -> tuple[Any, ...]:
        """What was measured, and on which kind of device."""
        return (*self.key, self.device_name)


AnyRow = TypeVar(
    "AnyRow",
    Record,
    LayersRecord,
    DecoderRecord,
    LinkRecord,
    CclRecord,
    NormRecord,
    HostRecord,
    MemcheckRecord,
)
_COMMANDS: dict[str, type[Any]] = {
    "run": Record,
    "layers": LayersRecord,
    "decoder": DecoderRecord,
    "links": LinkRecord,
    "ccl": CclRecord,
    "norm": NormRecord,
    "host": HostRecord,
    "litmus": LitmusRecord,
    "stress": StressRecord,
    "memcheck": MemcheckRecord,
}
COLUMNS = tuple(column.name for column in fields(Record))
_ADDED: dict[type[Any], dict[str, str]] = {  # columns that older files lack, and what they stand for
    Record: {"link_source": "", "epilogue": "", "scales": ""},
    CclRecord: {"variant": "", "comm_sms": ""},
    LinkRecord: {"path": ""},
}


def kind_of(path: Path) -> type[Any] | None:
    """Return the dataclass of a file's rows, one of `_COMMANDS`; None for a file of none of these commands."""
    header = set(read_rows(path).header)
    for kind in _COMMANDS.values():
        columns = {column.name for column in fields(kind)}
        if header <= columns and columns - header <= _ADDED.get(kind, {}).keys():
            return kind
    return None


def read_records(path: Path, *, speak: bool = True) -> list[Record]:
    """Return the rows of a file of ``iris-bench run``; see `read_as`."""
    return read_as(path, Record, speak=speak)


def read_as(path: Path, kind: type[AnyRow], *, speak: bool = True) -> list[AnyRow]:
    """Return a file's rows; of several processes one should speak of a last line that was cut, and is left out.

    Args:
        path: the file.
        kind: the dataclass of a row, one of `_COMMANDS`.
        speak: whether to warn.

    Raises:
        ValueError: there is no such file, it was not written by this command, or a number in it is none that can be
            measured; names the line.
    """
    found = read_rows(path)
    if not found.header:
        raise ValueError(f"{path} is not a CSV of iris-bench: it has no line that is whole")
    _check_columns(path, found.header, kind)
    records = [_parsed(found.header, row, kind, f"{path}, line {line}") for line, row in found.rows[1:]]
    if speak:
        found.warn_of_cut(path, "left out")
    return records


def _check_columns(path: Path, header: list[str], kind: type[Any]) -> None:
    """Raise ValueError unless a header is of this kind; says whose it is, or which columns are otherwise."""
    columns = {command: [column.name for column in fields(its)] for command, its in _COMMANDS.items()}
    (own,) = (command for command, its in _COMMANDS.items() if its is kind)
    for command, its in _COMMANDS.items():
        added = _ADDED.get(its, ())
        in_file, its_own = ([name for name in names if name not in added] for names in (header, columns[command]))
        if command != own and in_file == its_own:
            raise ValueError(f"{path} is a CSV of iris-bench {command}; this takes those of iris-bench {own}")
    ours = [name for name in columns[own] if name in header]
    in_file = [name for name in dict.fromkeys(header) if name in columns[own]]
    wrong = {
        "missing": [name for name in columns[own] if name not in (*header, *_ADDED.get(kind, ()))],
        "unknown": [name for name in header if name not in columns[own]],
        "repeated": [name for name in ours if header.count(name) > 1],
        "out of order": [name for name, right in zip(in_file, ours, strict=True) if name != right],
    }
    said = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items() if names)
    if said:
        raise ValueError(f"{path} is not a CSV of this version of iris-bench: its columns differ ({said})")


_PARSERS: dict[str, Any] = {
    "str": str,
    "int": int,
    "float | None": lambda text: float(text) if text else None,
    "int | None": lambda text: int(text) if text else None,
    "bool | None": {"": None, "True": True, "False": False}.__getitem__,
}


_SIZES = ("m", "n", "k", "tokens", "width", "features", "layers", "batch", "sequence")
_AT_LEAST_ONE = (*_SIZES, "world_size", "rounds", "burst")


def _parsed(header: list[str], row: list[str], kind: type[AnyRow], where: str) -> AnyRow:
    columns = fields(kind)
    if len(row) != len(header):
        raise ValueError(f"{where}: {len(row)} fields instead of {len(header)}")
    cells = _ADDED.get(kind, {}) | dict(zip(header, row, strict=True))
    if "shape_set" in cells:
        cells["shape_set"] = OLD_NAMES.get(cells["shape_set"], cells["shape_set"])
    if "family" in cells and "variant" in cells:
        cells["variant"] = current_name(cells["family"], cells["variant"])
    try:
        record = kind(**{column.name: _PARSERS[str(column.type)](cells[column.name]) for column in columns})
    except (KeyError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    if said := _fault(record):
        raise ValueError(f"{where}: {said}")
    return record


def _fault(record: AnyRow) -> str:
    """What a row says that no measurement came to, as a damaged file does; nothing if all can be."""
    for name, known in (("dtype", tuple(OPERAND_DTYPES)), ("status", STATUSES)):
        if (value := getattr(record, name, known[0])) not in known:
            return f"unknown {name} {value!r}; it is one of {', '.join(known)}"
    for column in fields(record):
        name, value = column.name, getattr(record, column.name)
        if name in _AT_LEAST_ONE and value < 1:
            return f"{name} is {value}; it is at least 1"
        if isinstance(value, float) and name != "error" and not 0 < value < math.inf:
            return f"{name} is {value:g}; it is positive and finite, or empty"
    error = getattr(record, "error", None)
    if error is not None and not (0 <= error < math.inf or (error == math.inf and record.status == "wrong")):
        return f"error is {error:g} and status {record.status}; it is not negative, and infinite only of what is wrong"
    if isinstance(record, Record) and record.world_size > 1 and record.ideal_us and record.link_gbps is None:
        return "ideal_us without the link_gbps that it is for"
    return ""
