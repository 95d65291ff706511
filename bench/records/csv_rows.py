"""A CSV that grows by whole rows. A last line that was cut, as its writer was interrupted, costs no other row."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ..command.exits import warn
from ..command.outputs import left_over, writing

Record = TypeVar("Record")


class Rows(NamedTuple):
    """What is in a file.

    Args:
        rows: those that are whole, the header too, each with the number of its first line.
        cut: the bytes of a last line that is not; empty where there is none.
        end: the number of the line after the last row.
    """

    rows: list[tuple[int, list[str]]]
    cut: bytes
    end: int

    @property
    def header(self) -> list[str]:
        """The names of the columns; none in a file without a whole line."""
        return self.rows[0][1] if self.rows else []

    def warn_of_cut(self, path: Path, what: str) -> None:
        """Say, if a line was cut, that this was done with it."""
        if self.cut:
            warn(f"{path}, line {self.end} is cut off, as its writing was interrupted; it is {what}")


def in_a_line(error: BaseException) -> str:
    """Return what a row says of an error: its kind and its words, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def read_rows(path: Path) -> Rows:
    """Return a file's rows. One is whole once its newline is there: without it the last column may be cut.

    Raises:
        ValueError: there is no such file, or it is no CSV; names the line.
    """
    try:
        lines = io.BytesIO(path.read_bytes()).readlines()
        cut = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""  # maybe within a letter
        text = [line.decode("utf-8") for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    reader = csv.reader(text, strict=True)
    rows: list[tuple[int, list[str]]] = []
    read = 0
    try:
        for row in reader:
            rows.append((read + 1, row))
            read = reader.line_num
    except csv.Error as error:
        # Only of the last line is an open quote a cut: anywhere else what follows it may be rows.
        if read != len(lines) - 1 or lines[-1].count(b'"') % 2 == 0:
            raise ValueError(f"{path}, line {read + 1} is no row of a CSV: {error}") from None
        cut = lines[-1] + cut
    return Rows(rows, cut, read + 1)


def append_records(path: Path, records: Sequence[Any], *, replace: bool = False) -> None:
    """Add rows, dataclasses of one kind, to a file, in one write; a new file gets a header.

    With `replace` what is there goes first. A last line that was cut is dropped, with a warning: what is added would be
    glued to it. A file that lacks columns of these rows gets them, empty.

    Raises:
        ValueError: what is in the file is no CSV.
        UnwritableError: it cannot be written, as where the disk is full.
    """
    if replace:
        with writing(path):
            path.unlink(missing_ok=True)
    present = read_rows(path) if path.exists() else Rows([], b"", 1)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = [column.name for column in fields(records[0])] if records else present.header
    if present.rows and present.header != header:
        _add_columns(path, present, header)
        present = read_rows(path)
    if not present.rows:
        writer.writerow(header)
    writer.writerows([as_text(value) for value in astuple(record)] for record in records)
    present.warn_of_cut(path, "dropped")
    with writing(path), path.open("ab") as file:
        if present.cut:
            file.seek(-len(present.cut), os.SEEK_END)
            file.truncate()
        file.write(text.getvalue().encode("utf-8"))


@dataclass
class Output(Generic[Record]):
    """The file that rows are added to, and those of this run; what is there is replaced, if so, when there are some."""

    path: Path | None
    done: Sequence[Record]
    replace: bool
    records: list[Record] = field(default_factory=list)

    def left(self) -> str:
        """Return what an interrupted command leaves, in words."""
        is_there = bool(self.done or self.records)
        return left_over(self.path, len(self.records), is_there=is_there, overwrite=self.replace)

    def add(self, records: list[Record]) -> None:
        """Keep rows, and write them."""
        if self.path:
            append_records(self.path, records, replace=self.replace and not self.records)
        self.records += records


def _add_columns(path: Path, present: Rows, header: list[str]) -> None:
    """Write a file's rows again with the columns of a header, in one step."""
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(zip(present.header, row, strict=True)) for _, row in present.rows[1:])
    new = path.with_suffix(".new")
    with writing(path):
        new.write_bytes(text.getvalue().encode("utf-8") + present.cut)
        new.replace(path)


def as_text(value: Any) -> str:
    """Return a value as it is written; None is empty, and a fraction has six digits."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
