"""CSVs whose writing was interrupted: what is whole is read and stays, and what was cut is said."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from records import make_records

from iris_bench.correctness.stress.record import check_file
from iris_bench.records.csv_rows import append_records
from iris_bench.records.record import Record, read_records

AWKWARD = 'ψ is "13",\nof 12'  # letters of several bytes, quotes and a newline: a cut may be within any


@pytest.fixture
def records() -> list[Record]:
    first, second, third = make_records()[:3]
    return [first, second, replace(third, reason=AWKWARD)]


def test_a_last_line_cut_anywhere_costs_no_other(
    tmp_path: Path, records: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    append_records(path, records[:2])
    whole = path.read_bytes()
    append_records(path, records[2:])
    text = path.read_bytes()
    assert read_records(path) == records
    assert capsys.readouterr().err == ""
    for end in range(len(whole) + 1, len(text)):
        path.write_bytes(text[:end])
        assert read_records(path) == records[:2], end
        assert path.read_bytes() == text[:end]
        append_records(path, records[2:])
        assert path.read_bytes() == text, end
        left_out, dropped = capsys.readouterr().err.splitlines()
        assert re.fullmatch(r"iris-bench: \S+rows\.csv, line 4 is cut off, .* it is left out", left_out)
        assert dropped == left_out.replace("left out", "dropped")


def test_one_of_several_processes_speaks(
    tmp_path: Path, records: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    append_records(tmp_path / "rows.csv", records)
    with (tmp_path / "rows.csv").open("a") as file:
        file.write("gemm")
    assert read_records(tmp_path / "rows.csv", speak=False) == records
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("second", "third"), [('a,"b\n', "a,b\n"), ('"a"b\n', 'a,"b\n'), ("a,b\n", '"a"b\n')])
def test_what_is_wrong_but_not_cut_is_refused_and_nothing_is_dropped(
    tmp_path: Path, records: list[Record], second: str, third: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n" + second + third)
    before = path.read_bytes()
    for act in (read_records, lambda path: append_records(path, records)):
        with pytest.raises(ValueError, match=r"rows\.csv, line [23] is no row of a CSV"):
            act(path)
    assert path.read_bytes() == before


def test_a_header_that_is_cut_is_refused_and_stays(tmp_path: Path, records: list[Record]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("family,vari")
    with pytest.raises(ValueError, match="no line that is whole"):
        read_records(path)
    with pytest.raises(ValueError, match="holds something else than the rows of iris-bench stress"):
        check_file(path)
    assert path.read_text() == "family,vari"


def test_a_stress_file_may_be_empty_or_new(tmp_path: Path) -> None:
    check_file(tmp_path / "new" / "stress.csv")
    (tmp_path / "new" / "stress.csv").touch()
    check_file(tmp_path / "new" / "stress.csv")
